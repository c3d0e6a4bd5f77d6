"""The commands that make a model of another one: `import` and `export` for Hugging Face's transformers, and `convert`.

`convert` makes another member of the family of a trained model."""

import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import check_unfinished, unfinished_folder
from manyformer.cli.app import USE, command
from manyformer.cli.console import Block, Note, Output, PageTable, print_note, status_line
from manyformer.cli.model_arguments import check_new_folder, model_folder, read_keywords
from manyformer.cli.options import KeywordsArgument, NewFolderOption, RunArgument, complete_recipes, complete_runs

if TYPE_CHECKING:
    from manyformer.conversion.hugging_face import ExportReport
    from manyformer.conversion.surgery import ConversionReport
    from manyformer.recipes import Recipe


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
    from manyformer.conversion.hugging_face import import_model
    from manyformer.conversion.hugging_face.model_import import save_imported

    check_new_folder(out)
    if not Path(folder).exists():
        remedy = f"nothing is downloaded: run `hf download {folder} --local-dir downloads/{Path(folder).name}` first"
        raise UserError(f"there is no folder {folder}; {remedy}")
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
    after `import manyformer.conversion.hugging_face.auto_model`. Models of language, translation and masked text,
    classifiers of texts, tokens and images, and readers of answers can be exported."""
    folder = model_folder(run)
    address = None
    # without a push the folder is complete at once; with one it stays marked as unfinished until all is uploaded
    if push is None:
        check_new_folder(out)
        report = _export(folder, out, dtype)
    else:
        work = f"export {folder} as {dtype} and push it to {push}"
        if check_unfinished(Path(out), work):
            print_note(f"going on with {out}, which was written and not pushed")
        # an upload may fail after minutes: the same command then goes on with the folder that is there
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
    from manyformer.conversion.hugging_face.model_export import push_folder

    with status_line(f"uploading {out}"):
        return push_folder(out, name)


def _export(folder: Path, out: str, dtype: str) -> "ExportReport":
    """Export the model in a folder with its card, if it has one."""
    from manyformer.conversion import load
    from manyformer.conversion.hugging_face import export_model

    card = folder / "README.md"
    run_card = None
    if card.is_file():
        run_card = card.read_text(encoding="utf-8")
    with status_line(f"exporting {folder}"):
        return export_model(load(folder), out, dtype=dtype, run_card=run_card)


@command(
    USE,
    "manyformer convert runs/bert --to longformer max_length=4096 window=256 --out models/longformer",
    "manyformer convert models/llama window=1024 sinks=4 --out models/llama-window",
    "manyformer convert runs/lm-stdlib kernel=favor --out runs/lm-favor",
    "manyformer convert runs/lm kernel=hedgehog --transfer 200 --match weights --data book.txt --out runs/lm-hedgehog",
    "manyformer convert models/llama kv_heads=2 --pooling mean --out models/llama-gqa",
    "manyformer convert models/llama depth=40 --growth silent --out models/llama-40",
    "manyformer convert models/llama depth=4 loops=8 --sharing stepwise --out models/llama-looped",
    "manyformer convert runs/lm-memory --to memorizing-transformer knn_memory_size=8192 --out models/memory",
    "manyformer train lm/stdlib kernel=favor init_from=runs/lm-favor",
    accepts_settings=True,
)
def convert(
    source: Annotated[
        str, Argument(help="The folder of a run or a model, also one of transformers.", autocompletion=complete_runs)
    ],
    keywords: KeywordsArgument = None,
    *,
    to: Annotated[
        str | None,
        Option(help="The recipe to convert to; by default that of the model.", autocompletion=complete_recipes),
    ] = None,
    out: NewFolderOption,
    growth: Annotated[
        Literal["silent", "overlapping"],
        Option(help="More layers: copies that write nothing at first, or two overlapping copies of the stack."),
    ] = "silent",
    pooling: Annotated[
        Literal["mean", "first"], Option(help="Fewer heads of keys and values: the mean of those replaced, or one.")
    ] = "mean",
    sharing: Annotated[
        Literal["mean", "stepwise"],
        Option(help="Layers applied several times: the mean of those in their places, or layers at even distances."),
    ] = "stepwise",
    transfer: Annotated[
        int | None, Option(min=1, help="Steps in which new kernels learn to imitate the attention they replace.")
    ] = None,
    data: Annotated[str | None, Option(help="The text file that they learn on.")] = None,
    match: Annotated[
        Literal["outputs", "weights"], Option(help="What they imitate: outputs of attention, or its weights.")
    ] = "outputs",
) -> Output:
    """Give a trained model another attention, longer context, a memory, early exits, fewer heads or more layers.

    Says which weights are copied, derived, new or left behind, how far the new model is from the old one, and what the
    paper found after further training: `manyformer train ... init_from=OUT`. Without --to only keywords change. With
    --transfer new kernels first learn to imitate the old ones; Ctrl-C ends that, and nothing is written."""
    from manyformer.config import TransferConfig
    from manyformer.conversion import load
    from manyformer.conversion.hugging_face.model_import import save_imported
    from manyformer.conversion.surgery import convert as convert_model
    from manyformer.models.model_files import is_hugging_face
    from manyformer.recipes import get_recipe

    if (transfer is None) != (data is None):
        raise UserError("--transfer STEPS and --data FILE belong together: new kernels learn on the text of the file")
    if transfer is None and match != "outputs":
        raise UserError(f"--match {match} says what --transfer STEPS imitates: set that too")
    config = TransferConfig(steps=transfer, match=match)
    folder = model_folder(source)
    check_new_folder(out)
    model = load(folder)
    recipe = get_recipe(to or model.spec.recipe)
    changed = read_keywords(recipe, keywords)
    with status_line(f"converting {source}") as update:
        converted = convert_model(
            model,
            to,
            growth=growth,
            pooling=pooling,
            sharing=sharing,
            transfer=config,
            data=data,
            on_progress=lambda step, loss: update(f"attention transfer: step {step}/{transfer}, loss {loss:.4g}"),
            **changed,
        )
    # a folder of transformers has no files of tokenizers in our form to copy
    if is_hugging_face(folder):
        save_imported(converted.model, out)
    else:
        converted.model.save(out, tokenizers_of=folder)
    report = converted.report
    page = [*_report_page(report, match), f"wrote {out}; further training, with data.path=FILE on your own data:"]
    page.append(_further_training(recipe, report.keywords, out))
    return Output({"out": out, **report._asdict()}, page)


def _further_training(recipe: "Recipe", keywords: dict[str, Any], out: str) -> str:
    """The command of a training that begins with the converted model; the text to train on is the user's to name."""
    defaults = recipe.signature.parameters
    # only those that a run must name; the vocabulary comes with the data
    settings = {name: value for name, value in keywords.items() if value != defaults[name].default}
    chosen = [shlex.quote(f"model.{name}={value}") for name, value in settings.items() if name != "vocab"]
    new_run = shlex.quote(f"{out.rstrip('/')}-trained")
    return " ".join(["manyformer train", recipe.card.name, f"init_from={shlex.quote(out)}", *chosen, f"out={new_run}"])


def _report_page(report: "ConversionReport", match: str) -> Iterator[Block]:
    """What became of the weights, and of the function."""
    from manyformer.conversion.surgery.attention_transfer import MATCH_LABELS

    fates = [
        *sorted((origin.kind, origin.how, origin.name) for origin in report.origins),
        *sorted(("left behind", reason, name) for name, reason in report.left_behind.items()),
    ]
    # sorted by fate first, because groupby joins neighbors alone
    groups = groupby(fates, key=lambda fate: fate[:2])
    yield PageTable(("", "how", "tensors"), [(*fate, _abbreviate([row[2] for row in group])) for fate, group in groups])
    yield from map(Note, report.changes)
    yield from (Note(f"warning: {sentence}") for sentence in report.warnings)
    yield "{:,} parameters before, {:,} after".format(*report.parameters)
    if report.difference is not None:
        yield f"logits of random tokens differ by at most {report.difference:.3g}"
    if report.finding:
        yield f"{report.paper}: {report.finding}"
    if report.transfers:
        rows = [(layer.name, f"{layer.before:.4f}", f"{layer.after:.4f}") for layer in report.transfers]
        yield PageTable((MATCH_LABELS[match], "before", "after"), rows, right=(1, 2))


def _abbreviate(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{len(names)}: {names[0]} ..."
