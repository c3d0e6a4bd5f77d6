"""`manyformer datastore`: datastores of context keys and next tokens, for retrieval by a language model.

Its commands show a progress bar, and then their results as a table or JSON."""

import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import typer
from typer import Argument, Option

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError, suggest_names
from manyformer.cli.app import USE, app, command, examples_epilog
from manyformer.cli.console import Block, Output, PageTable, format_bytes, format_count, print_note, status_line
from manyformer.cli.model_arguments import data_paths, load_generator, read_prompts, resolve_device
from manyformer.cli.options import ContextOption, DeviceOption, StrideOption, complete_runs

if TYPE_CHECKING:
    from manyformer.inference.datastore import Datastore, DatastoreFacts, DatastoreJob
    from manyformer.inference.datastore.inspect_prompt import PromptNeighbours
    from manyformer.inference.datastore.knn_head import OwnText
    from manyformer.inference.datastore.tuning import DatastoreScores, TuningResult


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
    from manyformer.inference.datastore import build as build_datastore
    from manyformer.inference.datastore import datastore_job, plan
    from manyformer.inference.datastore.build_datastore import default_folder

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
    from manyformer.inference.datastore import Datastore, FlatIndex, IVFPQIndex, make_index
    from manyformer.inference.datastore.datastore import INDEX
    from manyformer.inference.datastore.nearest_keys import remove_index

    kinds: dict[str, FlatIndex | IVFPQIndex] = {"flat": FlatIndex(), "ivfpq": IVFPQIndex(lists, codes, train_keys)}
    if kind not in kinds:
        raise UserError(f"there is no index '{kind}'; {suggest_names(kind, kinds)}")
    # exact, because the index is about to be replaced, and a damaged one must not be in the way
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
    from manyformer.inference.datastore.tuning import TEMPERATURES, WEIGHTS
    from manyformer.inference.datastore.tuning import tune as tune_datastore

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
    # in the datastore, where `evaluate`, `look` and `generate --datastore` find it
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
    from manyformer.inference.datastore import Datastore
    from manyformer.inference.datastore.tuning import score_datastore

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
    from manyformer.inference.datastore import Datastore, knn_lm
    from manyformer.inference.datastore.inspect_prompt import inspect_prompt

    store = Datastore(folder, exact=exact, probe=probe)
    model = knn_lm(load_generator(run, device), store, neighbours=neighbours, weight=weight, temperature=temperature)
    # without --lines all of standard input is one prompt
    (text,) = read_prompts(prompt, lines=False)
    retrieved = inspect_prompt(model, text, num_neighbours=shown)
    return Output(retrieved, neighbours_page(store, retrieved))


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
    from manyformer.inference.datastore import find_neighbours

    job, store = _job_and_datastore(run, folder, device, exact=exact, probe=probe)
    with ProgressBar("finding neighbours", "tokens") as bar:
        splits = find_neighbours(job, store, out, k=k, min_distance=min_distance, on_progress=bar)
    done = f"wrote {out}: {k} neighbours for every token of {', '.join(splits)}"
    further = f"next: manyformer train spalm data.neighbours={out} and the data settings of {run}"
    return Output({"neighbours": out, "k": k, "splits": splits}, [done, further])


def _job_and_datastore(
    run: str, folder: str, device: str | None, *, exact: bool, probe: int | None
) -> "tuple[DatastoreJob, Datastore]":
    from manyformer.inference.datastore import Datastore, check_fits, datastore_job

    store = Datastore(folder, exact=exact, probe=probe)
    job = datastore_job(run, keys=store.facts.keys, windows=store.facts.windows, device=resolve_device(device))
    check_fits(job.model, store)
    return job, store


N = TypeVar("N", int, float)

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between progress lines when stderr is not a terminal."""

MAX_TUNING_ROWS = 12
"""Rows in the table of tuned settings."""


class ProgressBar:
    """A progress bar on stderr with rate and time left, or a line at intervals if stderr is not a terminal."""

    def __init__(self, description: str, unit: str) -> None:
        self.description = description
        self.unit = unit
        self.start_time = self.last_line_time = time.monotonic()
        self.first_count: int | None = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[progress]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task(self.description, total=None, progress="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            print_note("the same command continues where this one stopped")

    def announce(self, facts: "DatastoreFacts") -> None:
        """Print the size of the datastore before it is built."""
        size = format_bytes(facts.bytes)
        line = f"{facts.entries:,} entries of {facts.width} numbers in {facts.precision}: {size} on the disk"
        if self._bar is None:
            print_note(line)
        else:
            self._bar.console.print(line)

    def __call__(self, done: int, total: int) -> None:
        current_time = time.monotonic()
        if self.first_count is None:
            # the rate counts only what this process has done
            self.first_count = done
            self.start_time = current_time
        rate = 0.0
        if current_time > self.start_time:
            rate = (done - self.first_count) / (current_time - self.start_time)
        progress = f"{format_count(done)} of {format_count(total)} {self.unit}, {format_count(rate)}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, progress=progress)
        # a log gets a line now and then instead of a bar that is drawn again and again
        elif current_time - self.last_line_time > SECONDS_BETWEEN_LINES:
            time_left = ""
            if rate:
                time_left = f", {(total - done) / rate:,.0f} s left"
            print_note(f"{self.description}: {progress}{time_left}")
            self.last_line_time = current_time


def read_numbers(option: str, text: str | None, kind: Callable[[str], N]) -> list[N] | None:
    """The comma-separated numbers of an option such as `0.1,1,10`, None if it is not given. Raises UserError."""
    if text is None:
        return None
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' must be numbers with commas between them, such as 1,10,100") from None


def facts_output(folder: str, facts: "DatastoreFacts", *, done: bool) -> Output:
    """The facts about a datastore that exists or would be built."""
    rows = [
        ("datastore", folder if done else f"{folder} (not built yet)"),
        ("text", f"{facts.source}: {facts.text.tokens:,} tokens in {facts.text.documents:,} documents"),
        ("entries", f"{facts.entries:,}"),
        ("keys", f"{facts.keys}, {facts.width} numbers in {facts.precision}"),
        ("size", f"{format_bytes(facts.bytes)} ({facts.bytes / 1e6:,.1f} MB)"),
        (
            "contexts",
            f"windows of {facts.context}, {facts.stride} apart" if facts.windows else f"rows of {facts.length}",
        ),
        ("model", f"{facts.recipe} ({facts.model[:12]})"),
    ]
    value = {"folder": folder, "done": done, "bytes": facts.bytes, **facts.to_json()}
    return Output(value, [PageTable(("", ""), rows)])


def tuning_output(folder: str, result: "TuningResult") -> Output:
    """The best settings with their perplexities."""
    from manyformer.models.scores import perplexity

    tokens = result.targets
    own_text = result.own_text
    table = [{**mix._asdict(), "perplexity": perplexity(nats, tokens).value} for mix, nats in result.nats.items()]
    facts = {"on": result.data_name, "tokens": tokens, **_overlap_facts(own_text)}
    rows = [
        (f"{row['neighbours']:,}", f"{row['weight']:g}", f"{row['temperature']:g}", f"{row['perplexity']:.2f}")
        for row in table[:MAX_TUNING_ROWS]
    ]
    headers = ("neighbours", "weight", "temperature", f"perplexity on {result.data_name}")
    saved = f"the first of {len(table):,} settings is saved in {folder} ({tokens:,} tokens)"
    return Output(
        {"folder": folder, **facts, "best": table[0], "all": table},
        [PageTable(headers, rows, right=range(4)), saved, _overlap_text(own_text)],
    )


def scores_output(run: str, store: "Datastore", result: "DatastoreScores") -> Output:
    """The scores of the model alone and with the datastore."""
    scores = {
        name: {score.name: score.value for score in evaluation.scores} | {"tokens a second": speed}
        for name, evaluation, speed in (
            ("alone", result.model_scores, result.model_speed),
            ("datastore", result.combined_scores, result.combined_speed),
        )
    }
    facts = {"entries": len(store), "bytes": store.bytes, **result.settings._asdict()}
    facts |= _overlap_facts(result.own_text)
    value = {"run": run, "folder": store.folder, "on": result.model_scores.data, **facts, **scores}
    return Output(value, _scores_page(run, store, result))


def _scores_page(run: str, store: "Datastore", result: "DatastoreScores") -> Iterator[Block]:
    yield f"{run} on {result.model_scores.data}: {result.model_scores.how}"
    rows = [
        (alone.name, f"{alone.value:.{alone.digits}f}", f"{combined.value:.{combined.digits}f}")
        for alone, combined in zip(result.model_scores.scores, result.combined_scores.scores)
    ]
    rows.append(("tokens a second", format_count(result.model_speed), format_count(result.combined_speed)))
    yield PageTable(("score", "model alone", "with datastore"), rows, right=(1, 2))
    chosen = result.settings
    settings = f"{chosen.neighbours:,} neighbours, weight {chosen.weight:g}, temperature {chosen.temperature:g}"
    yield f"{store.folder}: {len(store):,} entries, {format_bytes(store.bytes)}; {settings}"
    yield _overlap_text(result.own_text)


def _overlap_facts(own_text: "OwnText") -> dict[str, float]:
    return {"documents excluded": own_text.documents, "shared": own_text.overlap.shared_fraction}


def _overlap_text(own_text: "OwnText") -> str:
    shared = f"{own_text.overlap.shared_fraction:.1%} of the text is in the datastore, too"
    if own_text.documents:
        return f"{shared}; documents that were excluded from their own neighbours: {own_text.documents:,}"
    return f"{shared}, in short passages"


def neighbours_page(store: "Datastore", result: "PromptNeighbours") -> Iterator[Block]:
    """The most probable next tokens and the nearest contexts."""
    guesses = [
        (guess.token, f"{guess.combined:.1%}", f"{guess.model:.1%}", f"{guess.neighbours:.1%}")
        for guess in result.guesses
    ]
    yield PageTable(("next token", "together", "model", "neighbours"), guesses, right=(1, 2, 3))
    yield ""
    rows = [
        (f"{distance:.3f}", f"{weight:.1%}", f"{entry:,}", f"…{context}", token, continuation)
        for entry, context, token, continuation, distance, weight in result.neighbours
    ]
    yield PageTable(("distance", "share", "entry", "context", "followed by", "and then"), rows, right=(0, 1, 2, 3))
    yield f"from {store.facts.source}"
