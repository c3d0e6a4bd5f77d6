"""`manyformer generate`: generate text with a trained model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer
from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_note
from manyformer.cli.decoding_arguments import decoding_options
from manyformer.cli.model_arguments import load_generator, use_calibrated_exits
from manyformer.cli.prompt_input import read_prompts
from manyformer.cli.shared_options import CalibrationOption, DeviceOption, JsonLinesOption, RunArgument, StatsOption
from manyformer.decoding_options import DecodingOptions
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.datastore import RetrievalAugmentedModel
    from manyformer.generate import Decoding
    from manyformer.models import Model

TEMPERATURE = 0.8
"""The default sampling temperature: below 1 favors probable tokens without the repetitions of greedy decoding."""

TEXT_DECODING = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "beam", "length_penalty", "max_new", "crop", "stop"),
    "step_path",
)
TEXT_OPTIONS = (
    *("prompt", "greedy", "lines", "no_cache", "datastore", "weight", "retriever", "calibration", "as_json"),
    *TEXT_DECODING,
)
IMAGE_OPTIONS = ("complete", "classes", "tries", "data", "out")
"""The options that are for models of text, and of images, only."""


@command(
    USE,
    'manyformer generate runs/lm-stdlib "def "',
    'manyformer generate runs/lm-stdlib "import " --top-p 0.9 --max-new 100 --samples 3 --seed 1',
    'manyformer generate runs/lm-stdlib "class " --beam 4 --stats',
    'manyformer generate runs/lm-stdlib "def " --datastore runs/lm-stdlib/datastores/train',
    "echo 'To be, or' | manyformer generate runs/lm-shakespeare",
    'manyformer generate runs/exits "def " --greedy --max-new 32 --calibration runs/exits/calibration.json',
    "manyformer generate runs/images-pixels --samples 100 --temperature 0.9 --seed 1",
    "manyformer generate runs/images-pixels --samples 0 --complete 12 --tries 3 --data mine.npz --out sheets",
    "manyformer generate runs/images-classes --class 3 --class 8 --samples 10",
    "manyformer generate runs/images-superresolution --complete 12 --tries 3",
)
@decoding_options(
    *("temperature", *TEXT_DECODING, "seed", "samples"),
    temperature="0.8 for text unless given, 1 for images.",
    samples="1 unless given; or of new images, 64 unless given.",
)
def generate(
    context: typer.Context,
    run: RunArgument,
    prompt: Annotated[
        str | None, Argument(help="The text to continue; '-' or a pipe reads it. None: a text from its start.")
    ] = None,
    *,
    greedy: Annotated[bool, Option("--greedy", help="Always take the most probable token.")] = False,
    complete: Annotated[
        int | None,
        Option(min=0, help="Images: number of held-out ones to complete, or to make large again; 8 unless given."),
    ] = None,
    classes: Annotated[
        list[str] | None, Option("--class", metavar="NAME", help="Images: of this class; all unless given. Repeatable.")
    ] = None,
    tries: Annotated[int | None, Option(min=1, help="Images: completions of each; 4 unless given.")] = None,
    data: Annotated[str | None, Option(help="Images: complete these instead of the run's held-out ones.")] = None,
    out: Annotated[Path | None, Option(help="Images: folder of the pictures; the run's unless given.")] = None,
    lines: Annotated[bool, Option("--lines", help="Each line of standard input is a separate prompt.")] = False,
    no_cache: Annotated[
        bool, Option("--no-cache", help="Recompute everything for each token, for comparison: slower, same text.")
    ] = False,
    datastore: Annotated[
        str | None, Option(help="Retrieve from this datastore ('manyformer datastore' builds one).")
    ] = None,
    weight: Annotated[float | None, Option(help="Weight of the datastore, 0 to 1; the tuned one unless given.")] = None,
    retriever: Annotated[
        str | None, Option(help="For a model that attends to neighbours (spalm): the run that built the datastore.")
    ] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    stats: StatsOption = False,
    as_json: JsonLinesOption = False,
    **decoding: Unpack[DecodingOptions],
) -> None:
    """Continue a prompt with a trained language model; text is streamed as it is generated.

    A language model of images generates pictures of new images, and of held-out ones whose lower halves it completes; a
    model of classes, images of each class; a model for super-resolution makes small images large.
    """
    from manyformer.cli.text_output import write_texts
    from manyformer.data.pixel_tokenizer import PixelTokenizer

    generator = load_generator(run, device)
    if isinstance(generator.tokenizer, PixelTokenizer):
        _refuse(context, TEXT_OPTIONS, f"the model in {run} generates images, and {{option}} is for text: leave it out")
        from manyformer.cli.image_output import ImageJob, write_images

        temperature, samples, seed = decoding.get("temperature"), decoding.get("samples"), decoding.get("seed")
        job = ImageJob(samples, complete, tuple(classes or ()), tries, data, temperature, seed, out)
        write_images(generator, run, job, stats=stats)
        return
    _refuse(context, IMAGE_OPTIONS, f"the model in {run} generates text, and {{option}} is for images: leave it out")
    text_decoding = _text_decoding(context, decoding, greedy=greedy, use_cache=False if no_cache else None)
    if calibration is not None and datastore is not None:
        raise UserError("--calibration holds for a model without a datastore: leave out one of the two")
    use_calibrated_exits(generator, calibration, text_decoding)
    model = _with_datastore(generator, datastore, retriever, weight, device)
    text_stats = write_texts(model, read_prompts(prompt, lines=lines), text_decoding, sys.stdout, as_json=as_json)
    if stats:
        print_note(str(text_stats))


def _text_decoding(
    context: typer.Context, options: DecodingOptions, *, greedy: bool, use_cache: bool | None
) -> "Decoding":
    """The decoding of text: sampling at `TEMPERATURE` unless the options say otherwise."""
    from manyformer.generate import decoding_from_options

    samples, temperature, beam = options.get("samples"), options.get("temperature"), options.get("beam")
    if samples == 0:
        raise UserError("--samples is 0, but there must be at least one text")
    choices = {"--greedy": greedy, "--beam": bool(beam), "--temperature 0": temperature == 0}
    if selected := [option for option, is_selected in choices.items() if is_selected]:
        if len(selected) > 1:
            raise UserError(f"{selected[0]} and {selected[1]} choose tokens in two ways: leave one of them out")
        sampling_options = ("temperature", "top_k", "top_p", "min_p", *(() if beam else ("samples",)))
        message = f"{{option}} is for sampling, and {selected[0]} does not sample"
        _refuse(context, sampling_options, f"{message}: leave one of them out")
        options |= {"temperature": None, "seed": None, "samples": None, "best": samples if beam else None}
    elif temperature is None:
        options["temperature"] = TEMPERATURE
    options["stop"] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in options.get("stop") or ())
    options["use_cache"] = use_cache
    return decoding_from_options(**options)


def _with_datastore(
    model: "Model", folder: str | None, retriever: str | None, weight: float | None, device: str | None
) -> "Model | RetrievalAugmentedModel":
    """The model with its datastore, if there is one: a kNN-LM of its own neighbours, or with those of a retriever."""
    if folder is None:
        if weight is not None or retriever is not None:
            option = "--weight" if retriever is None else "--retriever"
            raise UserError(f"{option} needs a datastore; name one with --datastore")
        return model
    from manyformer.datastore import Datastore, RetrievalAugmentedModel, knn_lm

    store = Datastore(folder)
    if retriever is None:
        return knn_lm(model, store, weight=weight)
    if weight is not None:
        raise UserError("--weight is for models without a gate of neighbours: leave out --weight or --retriever")
    return RetrievalAugmentedModel(model, load_generator(retriever, device), store)


def _refuse(context: typer.Context, names: tuple[str, ...], message: str) -> None:
    """Raise UserError with `message` for the first of these options that has a value."""
    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] not in (None, False, [], ()):
            raise UserError(message.format(option=parameter.opts[0]))
