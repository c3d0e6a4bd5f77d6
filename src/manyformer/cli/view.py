"""The commands that show what trained models compute for an input: `view` as a page, `attention` as maps of weights.

`spans` lists the spans that heads have learned."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import USE, command
from manyformer.cli.console import Block, Note, Output, PageTable, print_note, print_result, status_line
from manyformer.cli.model_arguments import load_model, read_argument, resolve_device
from manyformer.cli.options import AnswerOption, DeviceOption, PictureOption, RunArgument

if TYPE_CHECKING:
    from manyformer.analysis.figures.attention_maps import AttentionMap
    from manyformer.analysis.viewer.model_view import ModelView
    from manyformer.analysis.viewer.server import ServedModel


@command(
    USE,
    'manyformer view runs/translate-multi30k "two men are sitting on a bench ." --out page.html',
    'manyformer view runs/one "a dog runs ." --compare runs/two --answer "ein hund rennt ."',
    "manyformer view runs/images-digits                    a held-out image, or those of a file",
    "manyformer view runs/tag-relations                    a held-out sentence with its labels, or one of a file",
    'manyformer view runs/lm-stdlib "def add(a, b):" --serve      other texts, and heads switched off',
    'manyformer view runs/lm-stdlib "def add(" --datastore runs/lm-stdlib/datastores/train',
)
def view(
    run: RunArgument,
    text: Annotated[
        str | None,
        Argument(
            help="The input text, - for standard input; for a run on other inputs, a file of them instead of its own."
        ),
    ] = None,
    *,
    answer: AnswerOption = None,
    compare: Annotated[
        list[str] | None, Option(help="Another run to show beside it; may be given several times.")
    ] = None,
    datastore: Annotated[
        str | None, Option(help="A datastore of the run, whose nearest contexts of each token are shown.")
    ] = None,
    out: Annotated[Path | None, Option(help="The page to write; view.html unless given.")] = None,
    serve: Annotated[bool, Option("--serve", help="Serve the page on 127.0.0.1 instead, until Ctrl-C.")] = False,
    port: Annotated[int | None, Option(min=0, max=65535, help="With --serve: the port, else a free one.")] = None,
    device: DeviceOption = None,
) -> None:
    """Write a page with the attention of every head for a text, and the computation per token where it varies.

    The page is one file for any browser, which needs no network. With --serve, the page takes other texts, and heads
    can be switched off.
    """
    from manyformer.analysis.heads import read_head_labels
    from manyformer.analysis.viewer.model_view import image_task, shows_rows_of_data, view_image, view_row, view_text
    from manyformer.analysis.viewer.page import AttentionPage, render_page
    from manyformer.analysis.viewer.server import ServedModel
    from manyformer.inference.evaluate.eval_data import held_batch, held_images

    if serve and out is not None:
        raise UserError("--out writes a page and --serve writes none: give one of them")
    if port is not None and not serve:
        raise UserError("--port is for --serve")
    models = [
        ServedModel(name, load_model(name, device), read_head_labels(Path(name))) for name in (run, *(compare or []))
    ]
    if datastore is not None:
        from manyformer.inference.datastore import Datastore, knn_lm

        # a datastore belongs to one model, whose keys it has
        models[0] = models[0]._replace(model=knn_lm(models[0].model, Datastore(datastore)))
    see: Callable[..., ModelView]
    title = ""
    if all(image_task(model) is not None for _, model, _ in models):
        if serve or answer is not None:
            raise UserError("a model of images is shown without --serve and --answer: it reads no text")
        # the kind of input decides what is shown: an image, a row of the run's data, or a text
        see = partial(view_image, image=held_images(run, 1, data=text, log=print_note)[0])
    elif all(shows_rows_of_data(model) for _, model, _ in models):
        if serve or answer is not None:
            raise UserError("a model that reads no plain text is shown without --serve and --answer")
        batch, tokenizers = held_batch(run, data=text)
        see = partial(view_row, batch=batch, tokenizers=tokenizers)
    else:
        if text is None:
            raise UserError(f"the model in {run} reads a text: give one after the name of the run")
        title = read_argument(text)
        if serve:
            _serve(models, title, answer, port or 0)
            return
        see = partial(view_text, text=title, answer=answer)
    views = [see(model, name=name, labels=labels) for name, model, labels in models]
    path = Path("view.html") if out is None else out
    AttentionPage(render_page(views, text=title)).save(path)
    print_note(f"wrote {path}")


def _serve(models: "list[ServedModel]", text: str, answer: str | None, port: int) -> None:
    from manyformer.analysis.viewer.server import ViewServer

    with ViewServer(models, text, answer, port=port) as server:
        print_result(server.url)
        # whoever reads a pipe or a file has no other way to learn the port, and the server does not end by itself
        sys.stdout.flush()
        print_note("serving until Ctrl-C")
        server.serve_forever()


@command(
    USE,
    'manyformer attention runs/translate-multi30k "two men are sitting on a bench ." --out look.png',
    'manyformer attention runs/one "a dog runs ." --compare runs/two --answer "ein hund rennt ." --out both.png',
    'manyformer attention runs/lm-stdlib "def add(a, b):" --layer 1 --heads --out heads.svg',
    "manyformer attention runs/audio-digit-strings-attention --sound digits.wav --out along-time.png",
    "manyformer attention runs/lm-memory --regions                the share of the memory",
)
def attention(
    run: RunArgument,
    text: Annotated[str | None, Argument(help="The input text, - for standard input; not with --regions.")] = None,
    *,
    answer: AnswerOption = None,
    compare: Annotated[list[str] | None, Option(help="Another run to show; may be given several times.")] = None,
    module: Annotated[
        str | None, Option(help="Modules whose name contains this, such as encoder; cross-attention unless given.")
    ] = None,
    layer: Annotated[int | None, Option(min=1, help="Which of these modules, from 1; the last unless given.")] = None,
    heads: Annotated[bool, Option("--heads", help="Show each head separately instead of their mean.")] = False,
    out: PictureOption = None,
    sound: Annotated[str | None, Option(help="A recording to read in place of a text, with --answer or none.")] = None,
    regions: Annotated[bool, Option("--regions", help="A run with a memory: attention to each region.")] = False,
    device: DeviceOption = None,
) -> Output:
    """Show the attention weights of a layer, or the alignment of a recurrent decoder, for a text.

    For a translation model rows are target tokens and columns source tokens; otherwise both are the text. Cells are
    relative to the largest weight of their row, which ends the line with its token. With --sound columns are seconds.
    With --compare, several models read the same. With --regions, a run with a memory reads its own held-out text."""
    from manyformer.analysis.figures.attention_maps import draw_maps, select_map

    if regions:
        return _region_masses(run, device)
    maps = {name: _maps_of(name, text, sound, answer, device) for name in (run, *(compare or []))}

    def selected() -> "dict[str, AttentionMap]":
        return {name: select_map(model_maps, part=module, layer=layer) for name, model_maps in maps.items()}

    return Output(
        {name: [_attention_record(attention_map) for attention_map in maps[name]] for name in maps},
        # all maps are in the value, whichever of them is to be shown
        _attention_page(selected, per_head=heads),
        out,
        lambda path: draw_maps(_shorten_titles(selected()), path, per_head=heads),
    )


def _attention_page(selected: "Callable[[], Mapping[str, AttentionMap]]", *, per_head: bool) -> Iterator[Block]:
    """A map of characters for each model, or for each of its heads."""
    from manyformer.analysis.figures.attention_maps import describe_map

    yield Note("cells are relative to the largest weight of their row, given at its end; · is a weight of exactly 0")
    for name, attention_map in selected().items():
        title = f"{name}: {attention_map.part}"
        # one map for each head, or a single one where the layer has none
        count = len(attention_map.weights)
        if per_head and count > 1:
            for head in range(count):
                yield f"{title}, head {head}\n{describe_map(attention_map, head)}\n"
        else:
            yield f"{title}, mean of {count} heads" if count > 1 else title
            yield f"{describe_map(attention_map)}\n"


def _maps_of(
    run: str, text: str | None, sound: str | None, answer: str | None, device: str | None
) -> "list[AttentionMap]":
    """The attention of the run's model to the text or the sound."""
    from manyformer.analysis.figures.attention_maps import attention_maps, sound_maps
    from manyformer.inference.evaluate.eval_data import task_of_run
    from manyformer.inference.evaluate.predict import first_recording, open_transcriber

    # exactly one of both
    if (text is None) == (sound is None):
        raise UserError("the model needs a text or --sound to read, one of them, or --regions for a run with a memory")
    if sound is None:
        return attention_maps(load_model(run, device), read_argument(text or ""), answer)
    trained = open_transcriber(run)
    model = trained.load_model(resolve_device(device))
    data = cast(Any, trained.config.data)
    return sound_maps(
        model,
        first_recording(trained, sound).to(model.device),
        trained.tokenizers.target,
        frame_seconds=data.hop / 1000,
        decodes=task_of_run(trained.config).generates is not None,
        answer=answer,
    )


def _region_masses(run: str, device: str | None) -> Output:
    """The share of attention to each region (memory, segment) for each layer."""
    from manyformer.analysis.figures.region_masses import region_masses
    from manyformer.inference.evaluate.eval_data import open_run

    model = load_model(run, device)
    held_out = open_run(run).load_split(None).batches
    assert held_out is not None
    with status_line(f"reading with {run}"):
        masses = region_masses(model, held_out)
    # the regions of all layers in the order of their first appearance; a layer may lack some
    names = list(dict.fromkeys(name for mass in masses for name in mass.shares))
    shares = [[f"{mass.shares[name]:.1%}" if name in mass.shares else "" for name in names] for mass in masses]
    rows = [(mass.part, *row) for mass, row in zip(masses, shares)]
    table = PageTable(("part", *names), rows, right=range(1, 1 + len(names)))
    return Output({mass.part: mass.shares for mass in masses}, [table])


def _shorten_titles(maps: "dict[str, AttentionMap]") -> "dict[str, AttentionMap]":
    """The maps keyed by the shortest ends of their folders' paths that distinguish them."""
    path_parts = {name: Path(name).resolve().parts for name in maps}
    for length in range(1, 1 + max(map(len, path_parts.values()))):
        titles = ["/".join(parts[-length:]) for parts in path_parts.values()]
        if len(set(titles)) == len(titles):
            return dict(zip(titles, maps.values()))
    return maps


def _attention_record(attention_map: "AttentionMap") -> dict[str, Any]:
    return {name: getattr(attention_map, name) for name in ("part", "rows", "columns", "weights")}


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
) -> Output:
    """Show the learned attention span of each head of each layer."""
    from manyformer.analysis.figures.token_work import describe_spans, draw_spans, layer_spans, layer_spans_for_text

    model = load_model(run, device)
    if text is None:
        layers = layer_spans(model)
    else:
        layers = layer_spans_for_text(model, text)
    return Output(layers, [describe_spans(layers)], out, partial(draw_spans, layers, title=run))
