"""`manyformer view`: a page that shows what trained models compute for a text."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_note, print_result
from manyformer.cli.model_arguments import load_model
from manyformer.cli.prompt_input import read_argument
from manyformer.cli.shared_options import AnswerOption, DeviceOption, RunArgument
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.viewer.model_view import ModelView
    from manyformer.viewer.server import ServedModel


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
    from manyformer.evaluate.held_out_batch import held_batch
    from manyformer.evaluate.held_out_images import held_images
    from manyformer.heads import read_head_labels
    from manyformer.viewer.model_view import image_task, shows_rows_of_data, view_image, view_row, view_text
    from manyformer.viewer.page import AttentionPage, render_page
    from manyformer.viewer.server import ServedModel

    if serve and out is not None:
        raise UserError("--out writes a page and --serve writes none: give one of them")
    if port is not None and not serve:
        raise UserError("--port is for --serve")
    models = [
        ServedModel(name, load_model(name, device), read_head_labels(Path(name))) for name in (run, *(compare or []))
    ]
    if datastore is not None:
        from manyformer.datastore import Datastore, knn_lm

        models[0] = models[0]._replace(model=knn_lm(models[0].model, Datastore(datastore)))
    see: Callable[..., ModelView]
    title = ""
    if all(image_task(model) is not None for _, model, _ in models):
        if serve or answer is not None:
            raise UserError("a model of images is shown without --serve and --answer: it reads no text")
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
    from manyformer.viewer.server import ViewServer

    with ViewServer(models, text, answer, port=port) as server:
        print_result(server.url)
        # whoever reads a pipe or a file has no other way to learn the port, and the server does not end by itself
        sys.stdout.flush()
        print_note("serving until Ctrl-C")
        server.serve_forever()
