"""`manyformer generate`: generate text with a trained model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import USE, DeviceOption, app, examples

if TYPE_CHECKING:
    from manyformer.datastore import RetrievalAugmentedModel
    from manyformer.models import Model

TEMPERATURE = 0.8
"""The default sampling temperature: below 1 favors probable tokens without the repetitions of greedy decoding."""

TEXT_OPTIONS = (
    *("prompt", "greedy", "top_k", "top_p", "min_p", "repetition_penalty", "beam", "length_penalty", "max_new", "stop"),
    *("lines", "no_cache", "datastore", "weight", "retriever", "as_json"),
)
IMAGE_OPTIONS = ("complete", "tries", "data", "out")
"""The options that are for models of text, and of images, only."""


@app.command(
    "generate",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer generate runs/lm-stdlib "def "',
        'manyformer generate runs/lm-stdlib "import " --top-p 0.9 --max-new 100 --samples 3 --seed 1',
        'manyformer generate runs/lm-stdlib "class " --beam 4 --stats',
        'manyformer generate runs/lm-stdlib "def " --datastore runs/lm-stdlib/datastores/train',
        "echo 'To be, or' | manyformer generate runs/lm-shakespeare",
        "manyformer generate runs/images-pixels --samples 100 --temperature 0.9 --seed 1",
        "manyformer generate runs/images-pixels --samples 0 --complete 12 --tries 3 --data mine.npz --out sheets",
    ),
)
def generate(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; '-' or a pipe reads it from standard input. None: a text from its start."
        ),
    ] = None,
    *,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most probable token.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Below 1 favors probable tokens, above 1 improbable ones; 0 is --greedy. 0.8 for text unless given, "
            "1 for images.",
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the K most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the most probable tokens that sum to this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample among tokens with at least this fraction of the highest probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divide the logits of tokens that occurred by this (1.1 to 1.5).")
    ] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Beam search of this width instead of sampling.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Length penalty of beam search; 0.6 unless given.")
    ] = None,
    max_new: Annotated[
        int | None,
        typer.Option(
            "--max-new",
            "--length",
            min=1,
            help="At most this many new tokens; 256, or fewer at the model's max_length.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; \\n means a new line. May be given several times.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Number of texts, 1 unless given, or of new images, 64 unless given.")
    ] = None,
    complete: Annotated[
        int | None,
        typer.Option(min=0, help="Images: number of held-out ones whose lower half is generated; 8 unless given."),
    ] = None,
    tries: Annotated[int | None, typer.Option(min=1, help="Images: completions of each; 4 unless given.")] = None,
    data: Annotated[str | None, typer.Option(help="Images: complete these instead of the run's held-out ones.")] = None,
    out: Annotated[Path | None, typer.Option(help="Images: folder of the pictures; the run's unless given.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a separate prompt.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute everything for each token, for comparison: slower, same text.")
    ] = False,
    datastore: Annotated[
        str | None, typer.Option(help="Retrieve from this datastore ('manyformer datastore' builds one).")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Weight of the datastore, 0 to 1; the tuned one unless given.")
    ] = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="For a model that attends to neighbours (spalm): the run that the datastore was built with."),
    ] = None,
    device: DeviceOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and cache size to stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each text, one per line.")] = False,
) -> None:
    """Continue a prompt with a trained language model; text is streamed as it is generated.

    A language model of images generates pictures of new images, and of held-out ones whose lower halves it completes.
    """
    from manyformer.cli.model_arguments import load_generator
    from manyformer.cli.prompt_input import read_prompts
    from manyformer.cli.text_output import TextOutput
    from manyformer.data.pixel_tokenizer import PixelTokenizer
    from manyformer.errors import UserError
    from manyformer.generate import decoding_from_options

    generator = load_generator(run, device)
    if isinstance(generator.tokenizer, PixelTokenizer):
        _refuse(context, TEXT_OPTIONS, f"the model in {run} generates images, and {{option}} is for text: leave it out")
        from manyformer.cli.image_output import ImageJob, write_images

        job = ImageJob(samples, complete, tries, data, temperature, seed, out)
        write_images(generator, run, job, stats=stats)
        return
    _refuse(context, IMAGE_OPTIONS, f"the model in {run} generates text, and {{option}} is for images: leave it out")
    if samples == 0:
        raise UserError("--samples is 0, but there must be at least one text")
    samples, temperature = samples or 1, TEMPERATURE if temperature is None else temperature
    sampling = beam is None and not greedy and temperature > 0
    if not sampling:
        decoder = "--beam" if beam else "--greedy"
        message = f"{{option}} is for sampling, and {decoder} does not sample: leave one of them out"
        _refuse(context, ("top_k", "top_p", "min_p"), message)
    decoding = decoding_from_options(
        max_new=max_new,
        temperature=temperature if sampling else None,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed if sampling else None,
        samples=samples if sampling else 1,
        beam=beam,
        length_penalty=length_penalty,
        best=samples if beam else 1,
        stop=tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ()),
        use_cache=False if no_cache else None,
    )
    model = _with_datastore(generator, datastore, retriever, weight, device)
    prompts = read_prompts(prompt, lines=lines)
    output = TextOutput(model, decoding, sys.stdout, as_json=as_json)
    output.write(prompts)
    if stats:
        from manyformer.cli.console import print_note

        print_note(str(output.stats))


def _with_datastore(
    model: "Model", folder: str | None, retriever: str | None, weight: float | None, device: str | None
) -> "Model | RetrievalAugmentedModel":
    """The model with its datastore, if there is one: a kNN-LM of its own neighbours, or with those of a retriever."""
    from manyformer.errors import UserError

    if folder is None:
        if weight is not None or retriever is not None:
            option = "--weight" if retriever is None else "--retriever"
            raise UserError(f"{option} needs a datastore; name one with --datastore")
        return model
    from manyformer.cli.model_arguments import load_generator
    from manyformer.datastore import Datastore, RetrievalAugmentedModel, knn_lm

    store = Datastore(folder)
    if retriever is None:
        return knn_lm(model, store, weight=weight)
    if weight is not None:
        raise UserError("--weight is for models without a gate of neighbours: leave out --weight or --retriever")
    return RetrievalAugmentedModel(model, load_generator(retriever, device), store)


def _refuse(context: typer.Context, names: tuple[str, ...], message: str) -> None:
    """Raise UserError with `message` for the first of these options that has a value."""
    from manyformer.errors import UserError

    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] not in (None, False, [], ()):
            raise UserError(message.format(option=parameter.opts[0]))
