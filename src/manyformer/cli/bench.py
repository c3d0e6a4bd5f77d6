"""`manyformer bench`: time, memory and FLOPs as a function of length."""

from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import JUDGE, DeviceOption, app, examples

if TYPE_CHECKING:
    from manyformer.bench import BenchReport


@app.command(
    "bench",
    rich_help_panel=JUDGE,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "manyformer bench compose --lengths 256:4096",
        "manyformer bench transformer-lm bert dim=512 --what forward --lengths 128,256,1024 --json",
        "manyformer bench compose:norm_order=pre compose:norm_order=post,feedforward=swiglu --against none",
    ),
)
def bench(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:KEY=VALUE,...]... [KEY=VALUE]...",
            help="Recipes, each with optional keywords; then keywords for all, such as dim=512.",
        ),
    ],
    *,
    lengths: Annotated[
        str, typer.Option(help="Lengths: A:B doubles from A to B; commas separate values.")
    ] = "256:2048",
    kinds: Annotated[
        str, typer.Option("--what", help="forward, step (training) and decode, separated by commas.")
    ] = "forward,step,decode",
    against: Annotated[
        str, typer.Option(help="The baseline recipe of the ratios; none for no ratios.")
    ] = "transformer-lm",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How many times each measurement is repeated, in turns.")] = 7,
    max_seconds: Annotated[
        float, typer.Option(help="Longer lengths are skipped for a recipe once a run takes more seconds than this.")
    ] = 60,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of torch threads; 1 gives the most stable times.")
    ] = None,
    device: DeviceOption = None,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    out: Annotated[
        str | None,
        typer.Option(help="FILE.png, .svg, .pdf, .csv or .json; without a suffix .png and .csv. [default: bench]"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; writes files only with --out.")
    ] = False,
) -> None:
    """Measure forward pass, training step and decoding of recipes at several lengths: time, memory and FLOPs.

    All are built with the same sizes (dim 256, 4 layers, 4 heads, vocabulary 256) and measured in turns, so that other
    load affects all equally. Reports how each grows with length, and from which length on it is faster than the
    baseline."""
    from manyformer.bench import bench as measure
    from manyformer.cli.bench_arguments import read_candidates, read_choices, read_lengths
    from manyformer.cli.console import print_result, status_line
    from manyformer.cli.model_arguments import resolve_device

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    candidates, keywords = read_candidates(context, arguments)
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
    _save(report, out, as_json=as_json)


def _save(report: "BenchReport", out: str | None, *, as_json: bool) -> None:
    from pathlib import Path

    from manyformer.cli.console import print_note

    if out is None and as_json:
        return
    path = Path(out or "bench")
    for file in [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".csv")]:
        report.save(file)
        print_note(f"wrote {file}")
