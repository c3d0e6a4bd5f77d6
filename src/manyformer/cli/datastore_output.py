"""Output of the datastore commands: a progress bar, then results as a table or JSON."""

import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from manyformer.cli.console import Block, Output, PageTable, format_bytes, format_count, print_note
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.datastore import Datastore, DatastoreFacts
    from manyformer.datastore.inspect_prompt import PromptNeighbours
    from manyformer.datastore.knn_head import OwnText
    from manyformer.datastore.tuning import DatastoreScores, TuningResult

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
    from manyformer.scores import perplexity

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
