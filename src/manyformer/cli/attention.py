"""`manyformer attention`: the attention weights of a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import USE, DeviceOption, app, examples

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.view.attention_maps import AttentionMap


@app.command(
    "attention",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer attention runs/translate-multi30k "two men are sitting on a bench ." --out look.png',
        'manyformer attention runs/one "a dog runs ." --compare runs/two --answer "ein hund rennt ." --out both.png',
        'manyformer attention runs/lm-stdlib "def add(a, b):" --layer 1 --heads --out heads.svg',
        "manyformer attention runs/lm-memory --regions                the share of the memory",
    ),
)
def attention(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    text: Annotated[str | None, typer.Argument(help="The input text; not with --regions.")] = None,
    *,
    answer: Annotated[
        str | None, typer.Option(help="The target of an encoder-decoder; its own translation unless given.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Another run to show beside it; may be given several times.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(help="Modules whose name contains this, such as encoder; cross-attention unless given."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=1, help="Which of these modules, counted from 1; the last unless given.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Draw each head separately instead of their mean.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write a picture: .png, .svg or .pdf.")] = None,
    regions: Annotated[
        bool, typer.Option("--regions", help="For a run with a memory: the share of attention to each region.")
    ] = False,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the weights of every module as JSON.")] = False,
) -> None:
    """Show the attention weights of a layer, or the alignment of a recurrent decoder, for a text.

    For a translation model rows are target tokens and columns source tokens; otherwise both are the text. Each line
    ends in the token with the largest weight. With --compare, several models read the same text. With --regions, a run
    with a memory reads its own held-out text."""
    from manyformer.cli.console import print_json, print_note, print_result
    from manyformer.errors import UserError
    from manyformer.view.attention_maps import attention_maps, describe_map, draw_maps, select_map

    if regions:
        _print_region_masses(run, device, as_json=as_json)
        return
    if text is None:
        raise UserError("the model needs a text to read; give one, or --regions for a run with a memory")
    maps = {name: attention_maps(load_model(name, device), text, answer) for name in (run, *(compare or []))}
    if as_json:
        print_json(
            {name: [_record(attention_map) for attention_map in model_maps] for name, model_maps in maps.items()}
        )
        return
    selected = {name: select_map(model_maps, part=module, layer=layer) for name, model_maps in maps.items()}
    for name, attention_map in selected.items():
        mean = f", mean of {len(attention_map.weights)} heads" if len(attention_map.weights) > 1 else ""
        print_result(f"{name}: {attention_map.part}{mean}")
        print_result(describe_map(attention_map) + "\n")
    if out is not None:
        draw_maps(_shorten_titles(selected), out, per_head=heads)
        print_note(f"wrote {out}")


def _print_region_masses(run: str, device: str | None, *, as_json: bool) -> None:
    """Print the share of attention to each region (memory, segment) for each layer."""
    from manyformer.cli.console import print_json, print_table, status_line
    from manyformer.evaluate.eval_data import load_split
    from manyformer.train.run_folder import as_run
    from manyformer.view.region_masses import region_masses

    model, record = load_model(run, device), as_run(Path(run))
    held_out = load_split(record, Path(run), None).batches
    assert held_out is not None
    with status_line(f"reading with {run}"):
        masses = region_masses(model, held_out)
    if as_json:
        print_json({mass.part: mass.shares for mass in masses})
        return
    names = list(dict.fromkeys(name for mass in masses for name in mass.shares))
    rows = [
        (mass.part, *(f"{100 * mass.shares[name]:.1f}%" if name in mass.shares else "" for name in names))
        for mass in masses
    ]
    print_table(("part", *names), rows, right=tuple(range(1, 1 + len(names))))


def load_model(name: str, device: str | None) -> "Model":
    """The trained model that a name on the command line refers to, on the requested device."""
    from manyformer.api import load
    from manyformer.cli.model_arguments import model_folder, resolve_device

    return load(model_folder(name)).to(resolve_device(device))


def _shorten_titles(maps: "dict[str, AttentionMap]") -> "dict[str, AttentionMap]":
    """The maps keyed by the shortest ends of their folders' paths that distinguish them."""
    path_parts = {name: Path(name).resolve().parts for name in maps}
    for length in range(1, 1 + max(map(len, path_parts.values()))):
        titles = ["/".join(parts[-length:]) for parts in path_parts.values()]
        if len(set(titles)) == len(titles):
            return dict(zip(titles, maps.values()))
    return maps


def _record(attention_map: "AttentionMap") -> dict[str, Any]:
    return {
        "part": attention_map.part,
        "rows": attention_map.rows,
        "columns": attention_map.columns,
        "weights": attention_map.weights.tolist(),
    }
