"""`manyformer bench`: time, memory and operations against length."""

from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import JUDGE, app, examples

if TYPE_CHECKING:
    from manyformer.bench import BenchReport


@app.command(
    "bench",
    rich_help_panel=JUDGE,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "manyformer bench compose --lengths 256:4096",
        "manyformer bench transformer-lm bert dim=512 --what forward --lengths 128,256,1024 --json",
        "manyformer bench compose:norm=pre compose:norm=post,feedforward=swiglu --against none",
    ),
)
def bench(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:KEY=VALUE,...]... [KEY=VALUE]...",
            help="Recipes, each with keywords of its own if you like; then keywords for all, such as dim=512.",
        ),
    ],
    *,
    lengths: Annotated[
        str, typer.Option(help="Lengths: A:B doubles from A to B; commas separate single ones.")
    ] = "256:2048",
    what: Annotated[str, typer.Option(help="Among forward, step (training) and decode, separated by commas.")] = (
        "forward,step,decode"
    ),
    against: Annotated[
        str, typer.Option(help="The recipe that ratios refer to; none for no ratios.")
    ] = "transformer-lm",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed, in turns.")] = 7,
    patience: Annotated[
        float, typer.Option(help="A recipe that takes more seconds for one run is not made longer.")
    ] = 60,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; 1 disturbs and is disturbed least.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    out: Annotated[
        str | None,
        typer.Option(help="FILE.png, .svg, .pdf, .csv or .json; without an ending .png and .csv. [default: bench]"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; writes files only with --out.")
    ] = False,
) -> None:
    """Measure recipes side by side against length: forward pass, training step, decoding; time, memory and FLOPs.

    All are built with the same sizes (dim 256, 4 layers, 4 heads, vocabulary 256) and take turns, so that a busy
    machine disturbs all alike. Says how each grows with length, and from which length on it is faster than softmax.
    """
    from manyformer.bench import bench as measure
    from manyformer.cli.bench_arguments import named, read_candidates, read_lengths
    from manyformer.cli.console import print_result, status_line
    from manyformer.cli.model_arguments import place

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    candidates, keywords = read_candidates(context, words)
    with status_line("measuring") as status:
        report = measure(
            candidates,
            read_lengths(lengths),
            what=named(what, "what"),
            against=None if against == "none" else against,
            keywords=keywords,
            batch=batch,
            rounds=rounds,
            patience=patience,
            device=place(device),
            precision=named(precision, "precision")[0],
            each=lambda text: status(f"measuring: {text}"),
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
