"""The commands with which a trained model writes: `generate` a continuation or images, and an answer to each input
that `translate`, `caption` and `transcribe` read."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import USE, command
from manyformer.cli.console import json_line, print_note, print_text
from manyformer.cli.model_arguments import (
    load_generator,
    load_translator,
    model_folder,
    read_lines,
    read_prompts,
    resolve_device,
    typed_lines,
    use_calibrated_exits,
)
from manyformer.cli.options import (
    CalibrationOption,
    DeviceOption,
    JsonLinesOption,
    RunArgument,
    RunFolderArgument,
    StatsOption,
    decoding_option,
    decoding_options,
    denoising_option,
    refuse_options,
)
from manyformer.inference.decoding_options import DecodingOptions, StepPath
from manyformer.inference.denoising_options import DenoisingOptions, SamplerName

if TYPE_CHECKING:
    from manyformer.inference.datastore import RetrievalAugmentedModel
    from manyformer.inference.generate import Decoding, GenerationResult, GenerationStats, Hypothesis
    from manyformer.models import Model

BeamOption = Annotated[int, decoding_option("beam")]
LengthPenaltyOption = Annotated[float, decoding_option("length_penalty")]
MaxNewOption = Annotated[int | None, decoding_option("max_new")]
StepPathOption = Annotated[StepPath | None, decoding_option("step_path")]
BestOption = Annotated[int, decoding_option("best", "Printed with number and score where they are several.")]

TEXT_DECODING = (
    *("greedy", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram", "beam", "length_penalty", "best"),
    *("max_new", "crop", "stop", "stop_ids", "step_path", "draft", "drafter"),
)
TEXT_OPTIONS = (
    *("prompt", "lines", "no_cache", "datastore", "weight", "retriever", "calibration", "as_json"),
    *TEXT_DECODING,
)
IMAGE_OPTIONS = ("complete", "classes", "tries", "data", "out")
"""The options that are for models of text, and of images, only."""
DIFFUSION_OPTIONS = ("gap", "sampler", "steps", "block")
"""The options that are for models by masked diffusion only."""
NEXT_TOKEN_OPTIONS = tuple(
    name for name in TEXT_OPTIONS if name not in ("prompt", "lines", "no_cache", "as_json", "max_new")
)
"""The options of text that are for models of each next token only."""


@command(
    USE,
    'manyformer generate runs/lm-stdlib "def "',
    'manyformer generate runs/lm-stdlib "def " --temperature 0.8',
    'manyformer generate runs/lm-stdlib "import " --top-p 0.9 --max-new 100 --samples 3 --seed 1',
    'manyformer generate runs/lm-stdlib "class " --beam 4 --stats',
    'manyformer generate runs/lm-stdlib "class " --draft 4 --drafter lookup --stats',
    'manyformer generate runs/lm-stdlib "def " --datastore runs/lm-stdlib/datastores/train',
    "echo 'To be, or' | manyformer generate runs/lm-shakespeare",
    'manyformer generate runs/exits "def " --greedy --max-new 32 --calibration runs/exits/calibration.json',
    'manyformer generate runs/mdlm "The " --max-new 64 --steps 32',
    'manyformer generate runs/mdlm "The ___ sat on" --gap _ --sampler low-confidence --temperature 0',
    "manyformer generate runs/images-pixels --samples 100 --temperature 0.9 --seed 1",
    "manyformer generate runs/images-pixels --samples 0 --complete 12 --tries 3 --data mine.npz --out sheets",
    "manyformer generate runs/images-classes --class 3 --class 8 --samples 10",
    "manyformer generate runs/images-superresolution --complete 12 --tries 3",
)
@decoding_options(
    *("temperature", *TEXT_DECODING, "seed", "samples"),
    temperature="1 unless given, where another option samples; of images always.",
    samples="1 unless given; or of new images, 64 unless given.",
)
def generate(
    context: typer.Context,
    run: RunArgument,
    prompt: Annotated[
        str | None, Argument(help="The text to continue; '-' or a pipe reads it. None: a text from its start.")
    ] = None,
    *,
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
    gap: Annotated[str | None, denoising_option("gap")] = None,
    sampler: Annotated[SamplerName | None, denoising_option("sampler")] = None,
    steps: Annotated[int | None, denoising_option("steps")] = None,
    block: Annotated[int | None, denoising_option("block")] = None,
    device: DeviceOption = None,
    stats: StatsOption = False,
    as_json: JsonLinesOption = False,
    **decoding: Unpack[DecodingOptions],
) -> None:
    """Continue a prompt with a trained language model; text is streamed as it is generated.

    The most probable token is taken each time unless an option samples or searches by a beam, as in `mf.generate`.
    A model by masked diffusion also fills the gaps of a text. A language model of images generates pictures of new
    images, and of held-out ones whose lower halves it completes; a model of classes, images of each class; a model for
    super-resolution makes small images large.
    """
    from manyformer.data.tokenizers.pixel_tokenizer import PixelTokenizer
    from manyformer.models import DiffusionLM

    generator = load_generator(run, device)
    # what the model was trained on decides which options make sense
    if isinstance(generator.tokenizer, PixelTokenizer):
        refuse_options(
            context,
            (*TEXT_OPTIONS, *DIFFUSION_OPTIONS),
            f"the model in {run} generates images, and {{option}} is for text: leave it out",
        )
        from manyformer.cli.image_output import ImageJob, write_images

        temperature = decoding.get("temperature")
        samples = decoding.get("samples")
        seed = decoding.get("seed")
        job = ImageJob(samples, complete, tuple(classes or ()), tries, data, temperature, seed, out)
        write_images(generator, run, job, stats=stats)
        return
    refuse_options(
        context, IMAGE_OPTIONS, f"the model in {run} generates text, and {{option}} is for images: leave it out"
    )
    if isinstance(generator, DiffusionLM):
        refuse_options(
            context,
            NEXT_TOKEN_OPTIONS,
            f"the model in {run} fills hidden tokens, and {{option}} is for a model of each next token: leave it out",
        )
        options = DenoisingOptions(
            gap=gap,
            sampler=sampler,
            steps=steps,
            block=block,
            max_new=decoding.get("max_new"),
            temperature=decoding.get("temperature"),
            seed=decoding.get("seed"),
            samples=decoding.get("samples"),
            use_cache=False if no_cache else None,
        )
        statistics = _fill_texts(generator, read_prompts(prompt, lines=lines), options, as_json=as_json)
        if stats:
            print_note(statistics)
        return
    refuse_options(
        context,
        DIFFUSION_OPTIONS,
        f"the model in {run} predicts each next token, and {{option}} is for a masked diffusion: leave it out",
    )
    text_decoding = _text_decoding(context, decoding.copy(), use_cache=False if no_cache else None)
    if calibration is not None and datastore is not None:
        raise UserError("--calibration holds for a model without a datastore: leave out one of the two")
    use_calibrated_exits(generator, calibration, text_decoding)
    model = _with_datastore(generator, datastore, retriever, weight, device)
    _note_choice(text_decoding, decoding)
    text_stats = _write_texts(model, read_prompts(prompt, lines=lines), text_decoding, as_json=as_json)
    if stats:
        print_note(str(text_stats))


def _text_decoding(context: typer.Context, options: DecodingOptions, *, use_cache: bool | None) -> "Decoding":
    """The decoding of text by these options, which it completes."""
    from manyformer.inference.generate import decoding_from_options

    samples = options.get("samples")
    temperature = options.get("temperature")
    beam = options.get("beam")
    if samples == 0:
        raise UserError("--samples is 0, but there must be at least one text")
    # each is a way to choose tokens; two of them contradict each other even where they would give the same text
    choices = {"--greedy": options.get("greedy"), "--beam": beam, "--temperature 0": temperature == 0}
    selected = [option for option, is_selected in choices.items() if is_selected]
    if len(selected) > 1:
        raise UserError(f"{selected[0]} and {selected[1]} choose tokens in two ways: leave one of them out")
    if selected:
        sampling_options = ("temperature", "top_k", "top_p", "min_p", *(() if beam else ("samples",)))
        message = f"{{option}} is for sampling, and {selected[0]} does not sample"
        refuse_options(context, sampling_options, f"{message}: leave one of them out")
        # a seed is allowed with any of them, and changes nothing
        options |= {"temperature": None, "seed": None, "samples": None}
    if beam and samples is not None:
        # of a beam the samples are the best hypotheses
        if options.get("best") is not None:
            raise UserError("--samples and --best both say how many hypotheses of the beam to print: leave one out")
        options["best"] = samples
    # shells pass these escapes as two characters
    options["stop"] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in options.get("stop") or ())
    options["stop_ids"] = tuple(options.get("stop_ids") or ()) or None
    options["use_cache"] = use_cache
    return decoding_from_options(**options)


def _note_choice(decoding: "Decoding", options: DecodingOptions) -> None:
    """Say how tokens are chosen where no option has said it."""
    from manyformer.inference.generate import GreedyChoice, SampledChoice

    if isinstance(decoding.choice, GreedyChoice) and not options.get("greedy") and options.get("temperature") != 0:
        print_note("the most probable token each time (--greedy); --temperature 0.8 samples instead")
    elif isinstance(decoding.choice, SampledChoice) and options.get("temperature") is None:
        print_note("sampled at temperature 1; --temperature 0.8 favors probable tokens")


def _with_datastore(
    model: "Model", folder: str | None, retriever: str | None, weight: float | None, device: str | None
) -> "Model | RetrievalAugmentedModel":
    """The model with its datastore, if there is one: a kNN-LM of its own neighbours, or with those of a retriever."""
    if folder is None:
        if weight is not None or retriever is not None:
            option = "--weight" if retriever is None else "--retriever"
            raise UserError(f"{option} needs a datastore; name one with --datastore")
        return model
    from manyformer.inference.datastore import Datastore, RetrievalAugmentedModel, knn_lm

    store = Datastore(folder)
    if retriever is None:
        return knn_lm(model, store, weight=weight)
    if weight is not None:
        raise UserError("--weight is for models without a gate of neighbours: leave out --weight or --retriever")
    return RetrievalAugmentedModel(model, load_generator(retriever, device), store)


def _write_texts(model: Any, prompts: list[str], decoding: "Decoding", *, as_json: bool) -> "GenerationStats":
    """Generate for all prompts and print the texts; returns speed and cache size.

    A single text is streamed while it is generated.
    """
    from manyformer.inference.generate import BeamSettings, generate

    # several texts would be mixed on the terminal if all were streamed
    is_single = len(prompts) == 1 and getattr(decoding.choice, "samples", 1) == 1
    if not is_single or as_json or isinstance(decoding.choice, BeamSettings):
        result = generate(model, prompts, decoding=decoding)
        for line in _output_lines(prompts, result, as_json=as_json):
            print_text(line)
        return result.stats
    # echoed with the first piece, so that a rejected prompt is not echoed
    echo = iter(prompts)

    def write(text: str) -> None:
        print_text(next(echo, "") + text, end="")

    result = generate(model, prompts, decoding=decoding, on_piece=lambda piece: write(piece.text))
    write("\n")
    return result.stats


def _fill_texts(model: Any, prompts: list[str], options: DenoisingOptions, *, as_json: bool) -> str:
    """Fill hidden tokens of all prompts and print the texts; returns how much was filled, and how fast."""
    from manyformer.inference.denoising import denoise

    result = denoise(model, prompts, **options)
    texts = [(prompt, filled) for prompt, row in zip(prompts, result.rows) for filled in row]
    for number, (prompt, filled) in enumerate(texts, 1):
        if as_json:
            print_text(json_line({"prompt": prompt, **filled._asdict()}))
            continue
        if len(texts) > 1:
            print_text(f"--- text {number}, seed {filled.seed}")
        print_text(filled.text or "")
    return result.statistics


def _output_lines(prompts: list[str], result: "GenerationResult", *, as_json: bool) -> Iterator[str]:
    # beam search has no seeds, so that the shorter list is filled up
    texts = [(prompt, answer) for prompt, answers in zip(prompts, result.rows) for answer in answers]
    for number, ((prompt, answer), seed) in enumerate(zip_longest(texts, result.seeds), 1):
        if as_json:
            yield json_line({"prompt": prompt, **answer._asdict(), "seed": seed})
            continue
        if len(texts) > 1:
            labels = [f"text {number}", *([] if seed is None else [f"seed {seed}"])]
            labels += [] if answer.score is None else [f"score {answer.score:.3f}"]
            yield f"--- {', '.join(labels)}"
        yield f"{prompt}{answer.text}"


@command(
    USE,
    'manyformer translate runs/translate-normalization "3 March 1998"',
    "manyformer translate runs/translate-multi30k --input test.en > test.out",
    "cat test.en | manyformer translate runs/translate-multi30k --beam 8 --n-best 3",
    "manyformer translate runs/calm --beam 1 --calibration runs/calm/calibration.json --input test.en",
)
def translate(
    run: RunArgument,
    text: Annotated[
        str | None,
        Argument(
            help="The text to translate; '-' or a pipe reads lines from standard input, a terminal asks for them."
        ),
    ] = None,
    *,
    file: Annotated[str | None, Option("--input", "-i", help="Translate each line of this file.")] = None,
    best: BestOption = 1,
    beam: BeamOption = 4,
    length_penalty: LengthPenaltyOption = 0.6,
    max_new: MaxNewOption = None,
    step_path: StepPathOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    stats: StatsOption = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Translate a text, a file or standard input with a trained encoder-decoder, one line at a time, in order.

    An empty line stays empty.
    """
    from manyformer.inference.generate import decoding_from_options

    if text is not None and file is not None:
        raise UserError("give either a text or --input, not both")
    decoding = decoding_from_options(
        beam=beam, length_penalty=length_penalty, best=best, max_new=max_new, step_path=step_path
    )
    translator = load_translator(run, decoding, device, calibration)
    if file is None and text is None and sys.stdin.isatty():
        print_note("one line at a time; Ctrl-D ends")
        translations: Iterable[tuple[str, tuple[Hypothesis, ...]]] = (
            (line, next(translator([line]))) for line in typed_lines("> ")
        )
    else:
        # the translator reads ahead, so its lines are a copy
        sources, lines = tee([text] if text not in (None, "-") else read_lines(file or "-"))
        translations = zip(lines, translator(sources))
    for number, (line, answers) in enumerate(translations, 1):
        if as_json:
            print_text(json_line({"source": line, "answers": _parts(answers, "text", "score", "finish")}))
        else:
            print_text(_ranked(number, answers) if best > 1 else answers[0].text or "")
    if stats:
        print_note(str(translator.stats))


@command(
    USE,
    "manyformer caption runs/modalities-captions picture.png",
    "manyformer caption runs/modalities-captions pictures/ --beam 8 --n-best 3",
    "manyformer caption runs/modalities-captions pictures/ --json > captions.jsonl",
)
def caption(
    run: RunFolderArgument,
    images: Annotated[str, Argument(help="An image file, a folder of image files, or an archive (.npz) of images.")],
    *,
    best: BestOption = 1,
    beam: BeamOption = 4,
    length_penalty: LengthPenaltyOption = 0.6,
    max_new: MaxNewOption = None,
    step_path: StepPathOption = None,
    device: DeviceOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Write a caption for each image: a line with the file and what the model says about it.

    Square images of another size are resized to that of the model.
    """
    from manyformer.inference.evaluate.predict import caption_images
    from manyformer.inference.generate import decoding_from_options

    model_folder(run)
    decoding = decoding_from_options(
        beam=beam, length_penalty=length_penalty, best=best, max_new=max_new, step_path=step_path
    )
    for location, captions in caption_images(run, images, decoding, device=resolve_device(device), log=print_note):
        if as_json:
            print_text(json_line({"input": location, "captions": _parts(captions, "text", "score")}))
        else:
            print_text(_ranked(location, captions) if best > 1 else f"{location}\t{captions[0].text}")


@command(
    USE,
    "manyformer transcribe runs/audio-digit-strings speech.wav",
    "manyformer transcribe runs/audio-digit-strings one.wav two.flac --beam 8",
    "manyformer transcribe runs/audio-digit-strings recordings/ --json > transcripts.jsonl",
)
def transcribe(
    run: RunFolderArgument,
    files: Annotated[list[str], Argument(help="Recordings: wav, flac, ogg or mp3 files, or folders of them.")],
    *,
    beam: BeamOption = 4,
    device: DeviceOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Write down what recordings say: a line with the file and the text for each.

    Other sample rates than that of the run are converted.
    """
    from manyformer.inference.evaluate.predict import transcribe_files

    model_folder(run)
    for location, text, log_probability in transcribe_files(run, files, beam=beam, device=resolve_device(device)):
        record = {"input": location, "text": text, "log_probability": log_probability}
        print_text(json_line(record) if as_json else f"{location}\t{text}")


def _parts(answers: "Iterable[Hypothesis]", *names: str) -> list[dict[str, Any]]:
    """These fields of each answer."""
    return [{name: getattr(answer, name) for name in names} for answer in answers]


def _ranked(source: str | int, answers: "Sequence[Hypothesis]") -> str:
    """A line for each answer to a source, the best first: the source's number or place, the score, the text."""
    scores = ("" if answer.score is None else f"{answer.score:.4f}" for answer in answers)
    return "\n".join(f"{source}\t{score}\t{answer.text}" for score, answer in zip(scores, answers))
