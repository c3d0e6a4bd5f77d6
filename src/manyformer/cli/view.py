"""`manyformer view`: a page that shows what trained models compute for a text."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_note
from manyformer.cli.model_arguments import load_model
from manyformer.cli.prompt_input import read_argument
from manyformer.cli.shared_options import AnswerOption, DeviceOption, RunArgument


@command(
    USE,
    'manyformer view runs/translate-multi30k "two men are sitting on a bench ." --out page.html',
    'manyformer view runs/one "a dog runs ." --compare runs/two --answer "ein hund rennt ."',
)
def view(
    run: RunArgument,
    text: Annotated[str, Argument(help="The input text, - for standard input.")],
    *,
    answer: AnswerOption = None,
    compare: Annotated[
        list[str] | None, Option(help="Another run to show beside it; may be given several times.")
    ] = None,
    out: Annotated[Path, Option(help="The page to write.")] = Path("view.html"),
    device: DeviceOption = None,
) -> None:
    """Write a page with the attention of every head for a text, and the computation per token where it varies.

    The page is one file for any browser, which needs no network.
    """
    from manyformer.viewer import view as make_page

    models = {name: load_model(name, device) for name in (run, *(compare or []))}
    make_page(models, read_argument(text), answer).save(out)
    print_note(f"wrote {out}")
