"""`manyformer bench`: time, memory and FLOPs as a function of length."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_note, print_result, status_line
from manyformer.cli.model_arguments import resolve_device
from manyformer.cli.shared_options import DeviceOption, RoundsOption
from manyformer.cli.shell_completion import complete_models

if TYPE_CHECKING:
    from manyformer.bench import BenchReport


@command(
    JUDGE,
    "manyformer bench compose --lengths 256:4096",
    "manyformer bench transformer-lm bert dim=512 --what forward --lengths 128,256,1024 --json",
    "manyformer bench compose:norm_order=pre compose:norm_order=post,feedforward=swiglu --against none",
    accepts_settings=True,
)
def bench(
    arguments: Annotated[
        list[str],
        Argument(
            metavar="NAME[:KEY=VALUE,...]... [KEY=VALUE]...",
            help="Recipes, each with optional keywords; then keywords for all, such as dim=512.",
            autocompletion=complete_models,
        ),
    ],
    *,
    lengths: Annotated[str, Option(help="Lengths: A:B doubles from A to B; commas separate values.")] = "256:2048",
    kinds: Annotated[str, Option("--what", help="Any of forward, step (training) and decode.")] = "forward,step,decode",
    against: Annotated[str, Option(help="The baseline recipe of the ratios; none for no ratios.")] = "transformer-lm",
    batch: Annotated[int, Option(min=1, max=1_000_000, help="Sequences in a batch.")] = 1,
    rounds: RoundsOption = 7,
    max_seconds: Annotated[
        float, Option(help="Longer lengths are skipped for a recipe once a run takes more seconds than this.")
    ] = 60,
    threads: Annotated[int | None, Option(min=1, help="Torch threads; 1 gives the most stable times.")] = None,
    device: DeviceOption = None,
    precision: Annotated[str, Option(help="auto, float32 or bfloat16.")] = "auto",
    out: Annotated[
        str | None, Option(help="FILE.png, .svg, .pdf, .csv or .json; without a suffix .png and .csv. [default: bench]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON; writes files only with --out.")] = False,
) -> None:
    """Measure forward pass, training step and decoding of recipes at several lengths: time, memory and FLOPs.

    All are built with the same sizes (dim 256, 4 layers, 4 heads, vocabulary 256) and measured in turns, so that other
    load affects all equally. Reports how each grows with length, and from which length on it is faster than the
    baseline."""
    from manyformer.bench import bench as measure
    from manyformer.cli.bench_arguments import read_candidates, read_choices, read_lengths

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    candidates, keywords = read_candidates(arguments)
    with status_line("measuring") as status:
        report = measure(
            candidates,
            read_lengths(lengths),
            what=read_choices(kinds, "what"),
            against=None if against == "none" else against,
            keywords=keywords,
            batch=batch,
            rounds=rounds,
            max_seconds=max_seconds,
            device=resolve_device(device),
            precision=read_choices(precision, "precision")[0],
            on_progress=lambda text: status(f"measuring: {text}"),
        )
    print_result(report.to_json() if as_json else "\n".join(report.lines()))
    if out is not None or not as_json:
        _write_files(report, Path(out or "bench"))


def _write_files(report: "BenchReport", path: Path) -> None:
    """Write the report to `path`, or as a picture and a table if it has no suffix."""
    from manyformer.bench import write_report

    for file in [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".csv")]:
        write_report(report, file)
        print_note(f"wrote {file}")
