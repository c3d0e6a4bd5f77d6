"""`manyformer attention`: what a trained model looks at."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import USE, app, examples

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.view.attention_maps import AttentionMap


@app.command(
    "attention",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer attention runs/translate-multi30k "two men are sitting on a bench ." --out look.png',
        'manyformer attention runs/one "a dog runs ." --beside runs/two --answer "ein hund rennt ." --out both.png',
        'manyformer attention runs/lm-stdlib "def add(a, b):" --layer 1 --heads --out heads.svg',
        "manyformer attention runs/lm-memory --regions                what goes to the memory",
    ),
)
def attention(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    text: Annotated[str | None, typer.Argument(help="What it reads; not with --regions.")] = None,
    *,
    answer: Annotated[
        str | None, typer.Option(help="What an encoder-decoder writes; its own translation unless given.")
    ] = None,
    beside: Annotated[
        list[str] | None, typer.Option(help="One more run, drawn beside; may be given several times.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="Parts whose name contains this, such as encoder; those over the source unless given."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=1, help="Which of these parts, from 1 on; the last unless given.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Draw each head by itself, not their mean.")] = False,
    out: Annotated[Path | None, typer.Option(help="A picture as well, .png, .svg or .pdf.")] = None,
    regions: Annotated[
        bool, typer.Option("--regions", help="Of a run with a memory: the shares of attention that go there.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the weights of every part as JSON.")] = False,
) -> None:
    """Show which tokens a model looks at: attention weights of a layer, or the alignment of a recurrent decoder.

    For a translation model a row is a word that is written, a column one of the source; else both are the text. Each
    line ends in the token that gets the most of the look. With --beside, several models read the same text. With
    --regions a run with a memory reads its own held-out text.
    """
    from manyformer.cli.console import print_json, print_note, print_result
    from manyformer.errors import UserError
    from manyformer.view.attention_maps import attention_maps, describe, draw_maps, select_map

    if regions:
        _regions(run, device, as_json=as_json)
        return
    if text is None:
        raise UserError("what is the model to read? give a text, or --regions for a run with a memory")
    found = {name: attention_maps(load_model(name, device), text, answer) for name in (run, *(beside or []))}
    if as_json:
        print_json({name: [_record(one) for one in several] for name, several in found.items()})
        return
    chosen = {name: select_map(several, part=part, layer=layer) for name, several in found.items()}
    for name, one in chosen.items():
        mean = f", mean of {len(one.weights)} heads" if len(one.weights) > 1 else ""
        print_result(f"{name}: {one.part}{mean}")
        print_result(describe(one) + "\n")
    if out is not None:
        draw_maps(_titled(chosen), out, apart=heads)
        print_note(f"wrote {out}")


def _regions(run: str, device: str | None, *, as_json: bool) -> None:
    """How much goes to a memory, in each layer."""
    from manyformer.cli.console import print_json, print_table, status_line
    from manyformer.evaluate.eval_data import split_of
    from manyformer.recipes import get_recipe
    from manyformer.train.run_folder import as_run
    from manyformer.view.region_masses import region_masses

    model, record = load_model(run, device), as_run(Path(run))
    held = split_of(record, get_recipe(record.recipe).card.task, Path(run), None).held
    assert held is not None
    with status_line(f"reading with {run}"):
        found = region_masses(model, held)
    if as_json:
        print_json({one.part: one.shares for one in found})
        return
    names = list(dict.fromkeys(name for one in found for name in one.shares))
    rows = [
        (one.part, *(f"{100 * one.shares[name]:.1f}%" if name in one.shares else "" for name in names)) for one in found
    ]
    print_table(("part", *names), rows, right=tuple(range(1, 1 + len(names))))


def load_model(name: str, device: str | None) -> "Model":
    """The trained model that a name on the command line means, on the device that is asked for."""
    from manyformer.api import load
    from manyformer.cli.model_arguments import model_folder, place

    return load(model_folder(name)).to(place(device))


def _titled(chosen: "dict[str, AttentionMap]") -> "dict[str, AttentionMap]":
    """The maps under the ends of their folders' names, as far as these differ."""
    words = {name: Path(name).resolve().parts for name in chosen}
    for length in range(1, 1 + max(map(len, words.values()))):
        short = ["/".join(parts[-length:]) for parts in words.values()]
        if len(set(short)) == len(short):
            return dict(zip(short, chosen.values()))
    return chosen


def _record(one: "AttentionMap") -> dict[str, Any]:
    return {"part": one.part, "rows": one.rows, "columns": one.columns, "weights": one.weights.tolist()}
