"""`manyformer efforts` and `manyformer spans`: computation per token, and learned attention spans."""

from typing import Annotated

from typer import Argument

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_json, print_note, print_result
from manyformer.cli.model_arguments import load_model
from manyformer.cli.shared_options import AnswerOption, DeviceOption, JsonOption, PictureOption, RunArgument


@command(
    USE,
    'manyformer efforts runs/universal "two men are sitting on a bench ." --out steps.png',
    'manyformer efforts runs/universal "a dog runs ." --answer "ein hund rennt ." --json',
)
def efforts(
    run: RunArgument,
    text: Annotated[str, Argument(help="The input text.")],
    *,
    answer: AnswerOption = None,
    out: PictureOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Computation per token of a text: the steps until a token halts, or the layer at which it exits.

    For adaptive computation time the picture shows the halting probabilities of each step.
    """
    from manyformer.view.token_counts import describe_counts, draw_counts
    from manyformer.view.token_work import token_work

    counts = token_work(load_model(run, device), text, answer)
    if as_json:
        print_json([{**count._asdict(), "mean": count.mean} for count in counts])
    else:
        for count in counts:
            title = f"{count.title}, mean {count.mean:.2f} of at most {count.maximum:g}"
            print_result(title, describe_counts(count), "")
    if out is not None:
        draw_counts(counts, out)
        print_note(f"wrote {out}")


@command(
    USE,
    "manyformer spans runs/adaptive-span --out spans.png",
    'manyformer spans runs/dynamic-span "To be, or not to be"',
)
def spans(
    run: RunArgument,
    text: Annotated[
        str | None, Argument(help="The input text, for spans that are computed for each token: the mean is shown.")
    ] = None,
    *,
    out: PictureOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the learned attention span of each head of each layer."""
    from manyformer.view.token_work import describe_spans, draw_spans, layer_spans, layer_spans_for_text

    model = load_model(run, device)
    layers = layer_spans(model) if text is None else layer_spans_for_text(model, text)
    if as_json:
        print_json([layer._asdict() for layer in layers])
    else:
        print_result(describe_spans(layers))
    if out is not None:
        draw_spans(layers, out, title=run)
        print_note(f"wrote {out}")
