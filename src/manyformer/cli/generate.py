"""`manyformer generate`: let a model write."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import USE, app, examples

if TYPE_CHECKING:
    from manyformer.datastore import RetrievalAugmentedModel
    from manyformer.models import Model

TEMPERATURE = 0.8
"""Of sampling, unless told otherwise: a little bolder than the likeliest, which repeats itself."""


@app.command(
    "generate",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer generate runs/lm-stdlib "def "',
        'manyformer generate runs/lm-stdlib "import " --top-p 0.9 --max-new 100 --n 3 --seed 1',
        'manyformer generate runs/lm-stdlib "class " --beam 4 --stats',
        'manyformer generate runs/lm-stdlib "def " --datastore runs/lm-stdlib/datastores/train',
        "echo 'To be, or' | manyformer generate runs/lm-shakespeare",
    ),
)
def generate(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to go on from; '-' or a pipe reads it from standard input. None: a text from its start."
        ),
    ] = None,
    *,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 bolder for the likely, above 1 for the unlikely; 0 is --greedy.")
    ] = TEMPERATURE,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the likeliest that make up this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Choose among those at least this share as likely as the likeliest.")
    ] = None,
    repetition: Annotated[
        float | None, typer.Option(help="Divide the logits of tokens seen already by this (1.1 to 1.5).")
    ] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Beam search of this width instead of sampling.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Length penalty of beam search; 0.6 unless given.")] = None,
    max_new: Annotated[
        int | None,
        typer.Option(
            "--max-new", "--length", min=1, help="At most this many new tokens; 256, or less where the model ends."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; \\n means a new line. May be given several times.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="How many texts.")] = 1,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt of its own.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything anew for each token, to compare: slower, same text.")
    ] = False,
    datastore: Annotated[
        str | None, typer.Option(help="Look into this datastore too ('manyformer datastore' makes one).")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="How much what it says counts, 0 to 1; what tuning found unless given.")
    ] = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="For a model that looks things up (spalm): the run that the datastore was built with."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say how fast it was and what the cache took, on stderr.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a text, on a line of its own.")
    ] = False,
) -> None:
    """Let a trained language model go on from a prompt; the text appears as it is written."""
    from manyformer.cli.model_arguments import writer
    from manyformer.cli.prompt_input import read_prompts
    from manyformer.cli.text_output import TextOutput
    from manyformer.errors import UserError
    from manyformer.generate import decoding_from_options

    sampling = beam is None and not greedy and temperature > 0
    if not sampling:
        _refuse_sampling({"--top-k": top_k, "--top-p": top_p, "--min-p": min_p}, "--beam" if beam else "--greedy")
    decoding = decoding_from_options(
        max_new=max_new,
        temperature=temperature if sampling else None,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        seed=seed if sampling else None,
        samples=n if sampling else 1,
        beam=beam,
        alpha=alpha,
        best=n if beam else 1,
        stop=tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ()),
        use_cache=False if no_cache else None,
    )
    if datastore is None and (weight is not None or retriever is not None):
        option = "--weight" if retriever is None else "--retriever"
        raise UserError(f"{option} is of what a datastore says; name one with --datastore")
    own = writer(run, device)
    model: "Model | RetrievalAugmentedModel" = own
    if datastore is not None:
        model = _looking(own, datastore, None if retriever is None else writer(retriever, device), weight)
    prompts = read_prompts(prompt, lines=lines)
    writing = TextOutput(model, decoding, sys.stdout, as_json=as_json)
    writing.write(prompts)
    if stats:
        from manyformer.cli.console import print_note

        print_note(str(writing.stats))


def _looking(
    model: "Model", folder: str, retriever: "Model | None", weight: float | None
) -> "Model | RetrievalAugmentedModel":
    """The model with a datastore: mixed with what followed its own neighbours, or given those of a retriever."""
    from manyformer.datastore import Datastore, RetrievalAugmentedModel, knn_lm
    from manyformer.errors import UserError

    store = Datastore(folder)
    if retriever is None:
        return knn_lm(model, store, weight=weight)
    if weight is not None:
        raise UserError("--weight is for models that have no gate of their own: leave it or --retriever out")
    return RetrievalAugmentedModel(model, retriever, store)


def _refuse_sampling(given: dict[str, float | None], other: str) -> None:
    from manyformer.errors import UserError

    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} chooses among several tokens, which {other} does not: leave one of them out")
