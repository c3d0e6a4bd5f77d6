"""`manyformer token_work` and `manyformer spans`: how much work each token gets, and how far heads look back."""

from pathlib import Path
from typing import Annotated

import typer

from manyformer.cli.app import USE, app, examples


@app.command(
    "efforts",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer efforts runs/universal "two men are sitting on a bench ." --out steps.png',
        'manyformer efforts runs/universal "a dog runs ." --answer "ein hund rennt ." --json',
    ),
)
def efforts(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    text: Annotated[str, typer.Argument(help="What it reads.")],
    *,
    answer: Annotated[
        str | None, typer.Option(help="What an encoder-decoder writes; its own translation unless given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A picture as well, .png, .svg or .pdf.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how much work each token of a text gets: the steps until it halts, or the layer that it leaves at.

    Where tokens halt by adaptive computation time, the picture shows with what probability at each step.
    """
    from manyformer.cli.attention import load_model
    from manyformer.cli.console import print_json, print_note, print_result
    from manyformer.view.token_counts import describe_steps, draw_counted
    from manyformer.view.token_work import token_work

    found = token_work(load_model(run, device), text, answer)
    if as_json:
        print_json([{**one._asdict(), "mean": one.mean} for one in found])
    else:
        for one in found:
            print_result(f"{one.title}, mean {one.mean:.2f} of at most {one.maximum:g}\n{describe_steps(one)}\n")
    if out is not None:
        draw_counted(found, out)
        print_note(f"wrote {out}")


@app.command(
    "spans",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer spans runs/adaptive-span --out spans.png",
        'manyformer spans runs/dynamic-span "To be, or not to be"',
    ),
)
def spans(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    text: Annotated[
        str | None, typer.Argument(help="What it reads, for spans that each token has for itself: the mean is shown.")
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="A picture as well, .png, .svg or .pdf.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how far back each head of each layer looks, where that is learned."""
    from manyformer.cli.attention import load_model
    from manyformer.cli.console import print_json, print_note, print_result
    from manyformer.view.token_work import describe_spans, draw_spans, spans, spans_for

    model = load_model(run, device)
    layers = spans(model) if text is None else spans_for(model, text)
    if as_json:
        print_json([one._asdict() for one in layers])
    else:
        print_result(describe_spans(layers))
    if out is not None:
        draw_spans(layers, out, title=run)
        print_note(f"wrote {out}")
