"""`manyformer export`: a model of this library for Hugging Face's transformers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import Block, Note, Output, PageTable, print_note, status_line
from manyformer.cli.model_arguments import check_new_folder, model_folder
from manyformer.cli.shared_options import NewFolderOption, RunArgument
from manyformer.files.verified_folder import check_unfinished, unfinished_folder

if TYPE_CHECKING:
    from manyformer.interop import ExportReport


@command(
    USE,
    "manyformer export runs/lm-stdlib --to hf --out exported/stdlib",
    "manyformer export runs/labels --out exported/labels --dtype bfloat16 --json",
    "manyformer export runs/lm-stdlib --out exported/stdlib --push my-name/stdlib",
)
def export(
    run: RunArgument,
    *,
    out: NewFolderOption,
    to: Annotated[Literal["hf"], Option(help="What reads the folder: Hugging Face's transformers.")] = "hf",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Option(help="The type of the weights in the file.")
    ] = "float32",
    push: Annotated[
        str | None, Option(help="Also upload it to the Hugging Face hub as this model, private if it is new.")
    ] = None,
) -> Output:
    """Write a trained model as a folder for Hugging Face's transformers: weights, tokenizer, settings, card.

    It holds a class of transformers where one equals the recipe; other models are loaded by trust_remote_code=True, or
    after `import manyformer.interop.auto_model`. Models of language, translation and masked text, classifiers of
    texts, tokens and images, and readers of answers can be exported."""
    folder = model_folder(run)
    address = None
    if push is None:
        check_new_folder(out)
        report = _export(folder, out, dtype)
    else:
        work = f"export {folder} as {dtype} and push it to {push}"
        if check_unfinished(Path(out), work):
            print_note(f"going on with {out}, which was written and not pushed")
        with unfinished_folder(Path(out), work):
            report = _export(folder, out, dtype)
            address = _push(out, push)
    rows = [
        ("class", report.architecture),
        ("loaded by", report.auto_class),
        ("parameters", f"{report.parameters:,}"),
        ("tensors", str(report.tensors)),
    ]
    page: list[Block] = [PageTable(("", run), rows)]
    if report.reason is not None:
        page.append(Note(f"a class of manyformer, because {report.reason}"))
    if report.tokenizer_reason is not None:
        page.append(Note(f"no tokenizer: {report.tokenizer_reason}"))
    page.append(f"wrote {out}" if address is None else f"wrote {out} and {address}")
    return Output({"out": out, **report._asdict(), "address": address}, page)


def _push(out: str, name: str) -> str:
    from manyformer.interop.hub_export import push_folder

    with status_line(f"uploading {out}"):
        return push_folder(out, name)


def _export(folder: Path, out: str, dtype: str) -> "ExportReport":
    """Export the model in a folder with its card, if it has one."""
    from manyformer.api import load
    from manyformer.interop import export_model

    card = folder / "README.md"
    run_card = None
    if card.is_file():
        run_card = card.read_text(encoding="utf-8")
    with status_line(f"exporting {folder}"):
        return export_model(load(folder), out, dtype=dtype, run_card=run_card)
