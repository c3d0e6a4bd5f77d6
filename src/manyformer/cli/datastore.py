"""`manyformer datastore`: contexts of a text and what followed them, for a language model to look into."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import USE, app, examples

if TYPE_CHECKING:
    from manyformer.datastore import Datastore, DatastoreJob
    from manyformer.models import LanguageModel

store_app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["--help", "-h"]})
app.add_typer(
    store_app,
    name="datastore",
    rich_help_panel=USE,
    help="Build, index, tune and look into datastores: a language model then knows a text that it was not trained on.",
    epilog=examples(
        "manyformer datastore build runs/lm-stdlib",
        "manyformer datastore build runs/lm-stdlib --data book.txt --out stores/book",
        "manyformer datastore tune runs/lm-stdlib stores/book --data other.txt",
        "manyformer datastore evaluate runs/lm-stdlib stores/book --data other.txt",
        'manyformer datastore look runs/lm-stdlib stores/book "def "',
        'manyformer generate runs/lm-stdlib "def " --datastore stores/book',
    ),
)

RunName = Annotated[str, typer.Argument(help="The folder of a run: a language model of text.")]
FolderArgument = Annotated[str, typer.Argument(metavar="DATASTORE", help="The folder of a datastore.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ExactOption = Annotated[bool, typer.Option("--exact", help="Compare with all keys, though there is an index.")]
ProbeOption = Annotated[int | None, typer.Option(min=1, help="Lists of an index to look through; 32 unless given.")]
NeighboursOption = Annotated[
    int | None, typer.Option(min=1, help="How many neighbours; what tuning found unless given.")
]
WeightOption = Annotated[float | None, typer.Option(help="Their share of the probability (lambda), 0 to 1.")]
TemperatureOption = Annotated[float | None, typer.Option(help="What squared distances are divided by.")]


@store_app.command("build")
def build(
    run: RunName,
    *,
    data: Annotated[
        list[str] | None, typer.Option(help="The text: a file, a folder, '-' or hf:NAME; may be given several times.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="train, valid or test of the run's own data; train unless --data is given.")
    ] = None,
    keys: Annotated[
        str, typer.Option(help="What stands for a context: feed-forward (what goes into the last such layer) or final.")
    ] = "feed-forward",
    precision: Annotated[str, typer.Option(help="Of keys: float16 or float32.")] = "float16",
    out: Annotated[str | None, typer.Option(help="The folder; RUN/datastores/TEXT unless given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how large it will be, and stop.")] = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a key for every context of a text, with the token that followed it; a killed build goes on when repeated.

    The text is read as the run reads its own: rows of the same length, the memory carried where the model has one.
    """
    from manyformer.cli.console import print_result
    from manyformer.cli.datastore_output import ProgressBar, print_facts
    from manyformer.cli.model_arguments import paths_of, place
    from manyformer.datastore import build as make
    from manyformer.datastore import datastore_job, plan
    from manyformer.datastore.build_job import default_folder

    work = datastore_job(run, data=paths_of(data), split=split, keys=keys, precision=precision, device=place(device))  # type: ignore[arg-type]
    folder = default_folder(work) if out is None else out
    if dry_run:
        print_facts(str(folder), plan(work), done=False, as_json=as_json)
        return
    with ProgressBar("storing keys", "entries") as bar:
        store = make(work, folder, tell=bar.announce, each=bar)
    print_facts(str(folder), store.facts, done=True, as_json=as_json)
    if not as_json:
        print_result(f"next: manyformer datastore tune {run} {folder}")


@store_app.command("index")
def index(
    folder: FolderArgument,
    *,
    kind: Annotated[str, typer.Option(help="flat (all keys, in memory) or ivfpq (codes of keys in lists).")] = "ivfpq",
    lists: Annotated[
        int | None, typer.Option(min=1, help="ivfpq: how many lists; a 64th of the keys unless given.")
    ] = None,
    codes: Annotated[
        int | None, typer.Option(min=1, help="ivfpq: bytes of a key's code; a 4th of its width unless given.")
    ] = None,
    learn: Annotated[int, typer.Option(min=1, help="ivfpq: keys that lists and codes are learned from.")] = 1_000_000,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the index; all keys are compared then.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make an index over the keys with faiss, for datastores of millions; distances still come from the keys."""
    from manyformer.cli.console import format_bytes, print_json, print_result
    from manyformer.cli.datastore_output import ProgressBar
    from manyformer.datastore import Datastore, FlatIndex, IVFPQIndex, make_index
    from manyformer.datastore.facts import INDEX
    from manyformer.datastore.faiss_index import remove_index
    from manyformer.errors import UserError, nearest

    kinds = {"flat": FlatIndex(), "ivfpq": IVFPQIndex(lists, codes, learn)}
    if kind not in kinds:
        raise UserError(f"there is no index '{kind}'; {nearest(kind, kinds)}")
    store = Datastore(folder, exact=True)
    file = store.folder / INDEX
    if remove:
        remove_index(file)
        print_result(f"{folder} has no index now")
        return
    with ProgressBar("indexing", "keys") as bar:
        make_index(store.keys, file, kinds[kind], each=lambda done: bar(done, len(store)))
    if as_json:
        print_json({"index": str(file), "kind": kind, "keys": len(store), "bytes": file.stat().st_size})
        return
    print_result(f"wrote {file}: {kind}, {len(store):,} keys, {format_bytes(file.stat().st_size)}")


@store_app.command("tune")
def tune(
    run: RunName,
    folder: FolderArgument,
    *,
    data: Annotated[
        list[str] | None, typer.Option(help="Held-out text; the run's validation data unless given.")
    ] = None,
    neighbours: Annotated[str | None, typer.Option(help="To try, such as 16,64,256; 1024 unless given.")] = None,
    weights: Annotated[str | None, typer.Option(help="To try; 0 to 0.95 by 0.05 unless given.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="To try; 0.1 to 100 unless given.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Look at so many tokens; all unless given.")] = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the weight and temperature (and number) of neighbours that held-out text likes best, and keep them."""
    from manyformer.cli.console import status_line
    from manyformer.cli.datastore_output import numbers, print_tuned
    from manyformer.cli.model_arguments import paths_of
    from manyformer.datastore.tuning import TEMPERATURES, WEIGHTS
    from manyformer.datastore.tuning import tune as find

    work, store = _both(run, folder, device, exact=exact, probe=probe)
    with status_line(f"tuning {folder}") as status:
        found = find(
            work,
            store,
            data=paths_of(data),
            neighbours=None if neighbours is None else [int(n) for n in numbers("--neighbours", neighbours, int)],
            weights=WEIGHTS if weights is None else numbers("--weights", weights, float),
            temperatures=TEMPERATURES if temperatures is None else numbers("--temperatures", temperatures, float),
            most=most,
            each=lambda share: status(f"tuning {folder}: {share:.0%}"),
        )
    store.tune(found.best)
    print_tuned(folder, found, as_json=as_json)


@store_app.command("evaluate")
def evaluate(
    run: RunName,
    folder: FolderArgument,
    *,
    split: Annotated[str | None, typer.Option(help="test or valid of the run's own data.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Score this text instead.")] = None,
    neighbours: NeighboursOption = None,
    weight: WeightOption = None,
    temperature: TemperatureOption = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the model with and without the datastore: perplexity, bits, accuracy, and tokens a second."""
    from manyformer.cli.console import status_line
    from manyformer.cli.datastore_output import print_scored
    from manyformer.cli.model_arguments import paths_of, place
    from manyformer.datastore import Datastore
    from manyformer.datastore.score_datastore import score

    store = Datastore(folder, exact=exact, probe=probe)
    mix = store.mix().changed(neighbours, weight, temperature)
    with status_line(f"scoring {run} with {folder}") as status:
        found = score(
            run,
            store,
            mix,
            split=split,
            data=paths_of(data),
            device=place(device),
            each=lambda what: status(f"scoring {what}"),
        )
    print_scored(run, store, found, as_json=as_json)


@store_app.command("look")
def look(
    run: RunName,
    folder: FolderArgument,
    prompt: Annotated[str | None, typer.Argument(help="A context; '-' or a pipe reads it from standard input.")] = None,
    *,
    shown: Annotated[int, typer.Option("--shown", "-n", min=1, help="How many neighbours to show.")] = 10,
    neighbours: NeighboursOption = None,
    weight: WeightOption = None,
    temperature: TemperatureOption = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a prompt finds: the nearest contexts, how far they are and how much they count, and what followed."""
    from manyformer.cli.datastore_output import print_looked
    from manyformer.cli.prompt_input import read_prompts
    from manyformer.datastore import Datastore
    from manyformer.datastore.inspect_prompt import inspect_prompt as find

    store = Datastore(folder, exact=exact, probe=probe)
    model = with_neighbours(run, store, device, neighbours=neighbours, weight=weight, temperature=temperature)
    (text,) = read_prompts(prompt, lines=False)
    print_looked(store, find(model, text, shown=shown), as_json=as_json)


@store_app.command("neighbours")
def neighbours_of(
    run: RunName,
    folder: FolderArgument,
    *,
    out: Annotated[
        str, typer.Option(help="The folder for what is found: data.neighbours of a run with the same data.")
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="How many for each token.")] = 4,
    apart: Annotated[
        int | None,
        typer.Option(
            min=0, help="In its own text a context's neighbours are further away than this, not of other documents."
        ),
    ] = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find neighbours for every token of the run's data, once: a model of the recipe spalm learns from them.

    The run is a language model that was trained before; train the other one with its data settings and
    data.neighbours=FOLDER.
    """
    from manyformer.cli.console import print_json, print_result
    from manyformer.cli.datastore_output import ProgressBar
    from manyformer.datastore import find_neighbours

    work, store = _both(run, folder, device, exact=exact, probe=probe)
    with ProgressBar("finding neighbours", "tokens") as bar:
        splits = find_neighbours(work, store, out, k=k, apart=apart, each=bar)
    if as_json:
        print_json({"neighbours": out, "k": k, "splits": splits})
        return
    print_result(f"wrote {out}: {k} neighbours for every token of {', '.join(splits)}")
    print_result(f"next: manyformer train spalm data.neighbours={out} and the data settings of {run}")


def with_neighbours(run: str, store: "Datastore", device: str | None, **mix: Any) -> "LanguageModel":
    """The model in the folder `run` with a datastore. Raises UserError for one that it does not fit."""
    from manyformer.cli.model_arguments import writer
    from manyformer.datastore import knn_lm

    return knn_lm(writer(run, device), store, **mix)


def _both(
    run: str, folder: str, device: str | None, *, exact: bool, probe: int | None
) -> "tuple[DatastoreJob, Datastore]":
    from manyformer.cli.model_arguments import place
    from manyformer.datastore import Datastore, check_fits, datastore_job

    store = Datastore(folder, exact=exact, probe=probe)
    work = datastore_job(run, keys=store.facts.keys, device=place(device))
    check_fits(work.model, store)
    return work, store
