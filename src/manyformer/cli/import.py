"""`manyformer import`: a model of Hugging Face's transformers as a model of this library."""

from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import Block, Note, Output, PageTable, status_line
from manyformer.cli.model_arguments import check_new_folder
from manyformer.cli.shared_options import NewFolderOption


@command(
    USE,
    "manyformer import downloads/gpt2 --out models/gpt2",
    'manyformer generate models/gpt2 "The meaning of life is"',
    "manyformer check models/gpt2",
    "manyformer import adapters --base downloads/gpt2 --out models/adapted",
    name="import",
)
def import_folder(
    folder: Annotated[str, Argument(help="A folder with config.json and safetensors that transformers wrote.")],
    *,
    out: NewFolderOption,
    base: Annotated[
        str | None, Option(help="For a folder of LoRA adapters that peft wrote: the folder of their model.")
    ] = None,
) -> Output:
    """Convert a model of Hugging Face's transformers to the recipe that equals it.

    Reads GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, SmolLM3, Gemma 2 and 3, DeepSeek-V3, gpt-oss, DiffLlama, BERT,
    RoBERTa, DistilBERT, Longformer, BigBird, Reformer, XLNet in one direction, ViT, DeiT, T5, BART, mBART, Marian,
    Pegasus and Decision Transformer, weights in one safetensors file or several. The
    tokenizer keeps its token ids, a head its labels. Settings that no recipe has, and tensors that are missing or left
    over, are refused; nothing is written then."""
    from manyformer.interop import import_model
    from manyformer.interop.model_import import save_imported

    check_new_folder(out)
    with status_line(f"reading {folder}"):
        imported = import_model(folder, base=base)
    save_imported(imported.model, out)
    report = imported.report
    rows = [
        ("family", report.family),
        ("recipe", report.recipe),
        ("parameters", f"{report.parameters:,}"),
        ("tensors read", str(report.tensors)),
        *((f"left out: {name}", reason) for name, reason in report.left_out.items()),
    ]
    page: list[Block] = [PageTable(("", folder), rows)]
    if report.new:
        advice = f"train it with init_from={out}"
        page.append(Note(f"the head is new, with random weights, because {folder} has none: {advice}"))
    if imported.model.tokenizer is None:
        page.append(Note("no tokenizer.json there: the model reads token ids alone"))
    return Output({"out": out, **report._asdict()}, [*page, f"wrote {out}"])
