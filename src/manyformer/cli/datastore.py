"""`manyformer datastore`: datastores of context keys and next tokens, for retrieval by a language model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from manyformer.cli.app import USE, app, command, examples_epilog
from manyformer.cli.console import Output, format_bytes, status_line
from manyformer.cli.model_arguments import data_paths, load_generator, resolve_device
from manyformer.cli.prompt_input import read_prompts
from manyformer.cli.shared_options import ContextOption, DeviceOption, StrideOption
from manyformer.cli.shell_completion import complete_runs
from manyformer.context_windows import ContextWindows
from manyformer.errors import UserError, suggest_names

if TYPE_CHECKING:
    from manyformer.datastore import Datastore, DatastoreJob

store_app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["--help", "-h"]})
app.add_typer(
    store_app,
    name="datastore",
    rich_help_panel=USE,
    help="Build, index, tune and inspect datastores, from which a language model retrieves text it was not trained on.",
    epilog=examples_epilog(
        "manyformer datastore build runs/lm-stdlib",
        "manyformer datastore build runs/lm-stdlib --data book.txt --out stores/book",
        "manyformer datastore tune runs/lm-stdlib stores/book --data other.txt",
        "manyformer datastore evaluate runs/lm-stdlib stores/book --data other.txt",
        'manyformer datastore look runs/lm-stdlib stores/book "def "',
        'manyformer generate runs/lm-stdlib "def " --datastore stores/book',
    ),
)

RunName = Annotated[str, Argument(help="The folder of a run: a language model of text.", autocompletion=complete_runs)]
FolderArgument = Annotated[str, Argument(metavar="DATASTORE", help="The folder of a datastore.")]
TextOption = Annotated[list[str] | None, Option(help="File, folder, '-' or hf:NAME; may be given several times.")]
ExactOption = Annotated[bool, Option("--exact", help="Exact search over all keys, even if there is an index.")]
ProbeOption = Annotated[int | None, Option(min=1, help="Number of lists of an index to search; 32 unless given.")]
NeighboursOption = Annotated[int | None, Option(min=1, help="Number of neighbours; the tuned one unless given.")]
WeightOption = Annotated[float | None, Option(help="Weight of the neighbours in the probability (lambda), 0 to 1.")]
ExcludeOwnOption = Annotated[
    bool,
    Option(
        "--exclude-own",
        help="Exclude documents that are in the datastore, too, from their own neighbours; refused unless given.",
    ),
]
TemperatureOption = Annotated[float | None, Option(help="Divides squared distances.")]


@command(None, name="build", group=store_app)
def build(
    run: RunName,
    *,
    data: TextOption = None,
    split: Annotated[str | None, Option(help="train, valid or test of the run's data; train without --data.")] = None,
    keys: Annotated[
        str, Option(help="Representation of a context: feed-forward (input of the last feed-forward layer) or final.")
    ] = "feed-forward",
    precision: Annotated[str, Option(help="Precision of keys: float16 or float32.")] = "float16",
    context: ContextOption = None,
    stride: StrideOption = None,
    out: Annotated[str | None, Option(help="The folder; RUN/datastores/TEXT unless given.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the size it would have, and stop.")] = False,
    device: DeviceOption = None,
) -> Output:
    """Store a key for every context of a text with its next token; an interrupted build continues when repeated.

    The text is read like the run's own data: rows of the same length, with the model's memory where it has one. With
    --context it is read in overlapping windows, as is then the text of `tune` and `evaluate`.
    """
    from manyformer.cli.datastore_output import ProgressBar, facts_output
    from manyformer.datastore import build as build_datastore
    from manyformer.datastore import datastore_job, plan
    from manyformer.datastore.build_datastore import default_folder

    # datastore_job refuses other keys and precisions
    choices: dict[str, Any] = {"keys": keys, "precision": precision}
    windows = ContextWindows.of(context, stride)
    text: dict[str, Any] = {"data": data_paths(data), "split": split, "windows": windows}
    job = datastore_job(run, device=resolve_device(device), **text, **choices)
    folder = default_folder(job) if out is None else out
    if dry_run:
        return facts_output(str(folder), plan(job), done=False)
    with ProgressBar("storing keys", "entries") as bar:
        store = build_datastore(job, folder, on_facts=bar.announce, on_progress=bar)
    facts = facts_output(str(folder), store.facts, done=True)
    return facts._replace(page=[*facts.page, f"next: manyformer datastore tune {run} {folder}"])


@command(None, name="index", group=store_app)
def index(
    folder: FolderArgument,
    *,
    kind: Annotated[str, Option(help="flat (all keys, in memory) or ivfpq (compressed codes in lists).")] = "ivfpq",
    lists: Annotated[int | None, Option(min=1, help="ivfpq: number of lists; a 64th of the keys unless given.")] = None,
    codes: Annotated[int | None, Option(min=1, help="ivfpq: bytes of a code; a 4th of the width unless given.")] = None,
    train_keys: Annotated[int, Option(min=1, help="ivfpq: keys that lists and codes are trained on.")] = 1_000_000,
    remove: Annotated[bool, Option("--remove", help="Remove the index; search is exact then.")] = False,
) -> Output:
    """Build a faiss index over the keys, for datastores of millions; distances are still computed from the keys."""
    from manyformer.cli.datastore_output import ProgressBar
    from manyformer.datastore import Datastore, FlatIndex, IVFPQIndex, make_index
    from manyformer.datastore.datastore import INDEX
    from manyformer.datastore.key_search import remove_index

    kinds: dict[str, FlatIndex | IVFPQIndex] = {"flat": FlatIndex(), "ivfpq": IVFPQIndex(lists, codes, train_keys)}
    if kind not in kinds:
        raise UserError(f"there is no index '{kind}'; {suggest_names(kind, kinds)}")
    store = Datastore(folder, exact=True)
    file = store.folder / INDEX
    if remove:
        remove_index(file)
        return Output({"removed": file}, [f"removed the index of {folder}"])
    with ProgressBar("indexing", "keys") as bar:
        make_index(store.keys, file, kinds[kind], on_progress=lambda done: bar(done, len(store)))
    size = file.stat().st_size
    value = {"index": file, "kind": kind, "keys": len(store), "bytes": size}
    return Output(value, [f"wrote {file}: {kind}, {len(store):,} keys, {format_bytes(size)}"])


@command(None, name="tune", group=store_app)
def tune(
    run: RunName,
    folder: FolderArgument,
    *,
    data: Annotated[list[str] | None, Option(help="Held-out text; the run's validation data unless given.")] = None,
    neighbours: Annotated[str | None, Option(help="Numbers to try, such as 16,64,256; 1024 unless given.")] = None,
    weights: Annotated[str | None, Option(help="Weights to try; 0 to 0.95 by 0.05 unless given.")] = None,
    temperatures: Annotated[str | None, Option(help="Temperatures to try; 0.1 to 100 unless given.")] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Number of held-out tokens to use; all unless given.")] = None,
    exclude_own: ExcludeOwnOption = False,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
) -> Output:
    """Find the weight, temperature (and number) of neighbours with the lowest held-out perplexity, and save them."""
    from manyformer.cli.datastore_output import read_numbers, tuning_output
    from manyformer.datastore.tuning import TEMPERATURES, WEIGHTS
    from manyformer.datastore.tuning import tune as tune_datastore

    job, store = _job_and_datastore(run, folder, device, exact=exact, probe=probe)
    with status_line(f"tuning {folder}") as status:
        result = tune_datastore(
            job,
            store,
            data=data_paths(data),
            neighbours=read_numbers("--neighbours", neighbours, int),
            weights=read_numbers("--weights", weights, float) or WEIGHTS,
            temperatures=read_numbers("--temperatures", temperatures, float) or TEMPERATURES,
            max_tokens=max_tokens,
            exclude_own=exclude_own,
            on_progress=lambda share: status(f"tuning {folder}: {share:.0%}"),
        )
    store.save_settings(result.best)
    return tuning_output(folder, result)


@command(None, name="evaluate", group=store_app)
def evaluate(
    run: RunName,
    folder: FolderArgument,
    *,
    split: Annotated[str | None, Option(help="test or valid of the run's own data.")] = None,
    data: Annotated[list[str] | None, Option(help="Score this text instead.")] = None,
    exclude_own: ExcludeOwnOption = False,
    neighbours: NeighboursOption = None,
    weight: WeightOption = None,
    temperature: TemperatureOption = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
) -> Output:
    """Score the model with and without the datastore: perplexity, bits, accuracy, and tokens per second."""
    from manyformer.cli.datastore_output import scores_output
    from manyformer.datastore import Datastore
    from manyformer.datastore.tuning import score_datastore

    store = Datastore(folder, exact=exact, probe=probe)
    mix = store.load_settings().with_overrides(neighbours, weight, temperature)
    with status_line(f"scoring {run} with {folder}") as status:
        scores = score_datastore(
            run,
            store,
            mix,
            split=split,
            data=data_paths(data),
            exclude_own=exclude_own,
            device=resolve_device(device),
            on_status=lambda text: status(f"scoring {text}"),
        )
    return scores_output(run, store, scores)


@command(None, name="look", group=store_app)
def look(
    run: RunName,
    folder: FolderArgument,
    prompt: Annotated[str | None, Argument(help="A context; '-' or a pipe reads it from standard input.")] = None,
    *,
    shown: Annotated[int, Option("--shown", "-n", min=1, help="How many neighbours to show.")] = 10,
    neighbours: NeighboursOption = None,
    weight: WeightOption = None,
    temperature: TemperatureOption = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
) -> Output:
    """Show the nearest contexts of a prompt: distances, weights, and the tokens that followed them."""
    from manyformer.cli.datastore_output import neighbours_page
    from manyformer.datastore import Datastore, knn_lm
    from manyformer.datastore.inspect_prompt import inspect_prompt

    store = Datastore(folder, exact=exact, probe=probe)
    model = knn_lm(load_generator(run, device), store, neighbours=neighbours, weight=weight, temperature=temperature)
    (text,) = read_prompts(prompt, lines=False)
    found = inspect_prompt(model, text, num_neighbours=shown)
    return Output(found, neighbours_page(store, found))


@command(None, name="neighbours", group=store_app)
def neighbours_of(
    run: RunName,
    folder: FolderArgument,
    *,
    out: Annotated[str, Option(help="The output folder: data.neighbours of a run with the same data.")],
    k: Annotated[int, Option("-k", min=1, help="Number of neighbours for each token.")] = 4,
    min_distance: Annotated[
        int | None,
        Option(min=0, help="Minimum distance in tokens of neighbours in the same text; other documents unless given."),
    ] = None,
    exact: ExactOption = False,
    probe: ProbeOption = None,
    device: DeviceOption = None,
) -> Output:
    """Precompute neighbours for every token of the run's data, to train a model of the recipe spalm.

    The run is a trained language model; train spalm with its data settings and data.neighbours=FOLDER.
    """
    from manyformer.cli.datastore_output import ProgressBar
    from manyformer.datastore import find_neighbours

    job, store = _job_and_datastore(run, folder, device, exact=exact, probe=probe)
    with ProgressBar("finding neighbours", "tokens") as bar:
        splits = find_neighbours(job, store, out, k=k, min_distance=min_distance, on_progress=bar)
    done = f"wrote {out}: {k} neighbours for every token of {', '.join(splits)}"
    further = f"next: manyformer train spalm data.neighbours={out} and the data settings of {run}"
    return Output({"neighbours": out, "k": k, "splits": splits}, [done, further])


def _job_and_datastore(
    run: str, folder: str, device: str | None, *, exact: bool, probe: int | None
) -> "tuple[DatastoreJob, Datastore]":
    from manyformer.datastore import Datastore, check_fits, datastore_job

    store = Datastore(folder, exact=exact, probe=probe)
    job = datastore_job(run, keys=store.facts.keys, windows=store.facts.windows, device=resolve_device(device))
    check_fits(job.model, store)
    return job, store
