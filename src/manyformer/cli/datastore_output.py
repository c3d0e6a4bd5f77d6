"""How the datastore commands speak: a bar while they work, then what a person or a script wants to know."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from manyformer.cli.console import format_bytes, format_count, print_json, print_note, print_result, print_table
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.datastore import Datastore, DatastoreFacts
    from manyformer.datastore.inspect_prompt import PromptNeighbours
    from manyformer.datastore.score_datastore import DatastoreScores
    from manyformer.datastore.tuning import TuningResult

N = TypeVar("N", int, float)

QUIET = 10.0
"""Seconds between lines where nobody watches."""

SHOWN = 12
"""Settings in the table of a tuning."""


class ProgressBar:
    """A bar on stderr with rate and time left, or now and then a line where that is no terminal."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self.begun = self.told = time.monotonic()
        self.first: int | None = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task(self.what, total=None, told="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            print_note("the same command goes on where this one was")

    def announce(self, facts: "DatastoreFacts") -> None:
        """What it will be, before it begins."""
        line = f"{facts.entries:,} entries of {facts.width} numbers in {facts.precision}: {format_bytes(facts.bytes)} on the disk"
        if self._bar is None:
            print_note(line)
        else:
            self._bar.console.print(line)

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if self.first is None:
            # what an earlier process did is no measure of this one
            self.first, self.begun = done, now
        rate = (done - self.first) / (now - self.begun) if now > self.begun else 0.0
        told = f"{format_count(done)} of {format_count(of)} {self.unit}, {format_count(rate)}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of, told=told)
        elif now - self.told > QUIET:
            left = f", {(of - done) / rate:,.0f} s left" if rate else ""
            print_note(f"{self.what}: {told}{left}")
            self.told = now


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """The numbers of an option such as `0.1,1,10`. Raises UserError."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' must be numbers with commas between them, such as 1,10,100") from None


def print_facts(folder: str, facts: "DatastoreFacts", *, done: bool, as_json: bool) -> None:
    """What a datastore is or will be."""
    if as_json:
        print_json({"folder": folder, "done": done, "bytes": facts.bytes, **facts.json()})
        return
    rows = [
        ("datastore", folder if done else f"{folder} (nothing is written yet)"),
        ("text", f"{facts.source}: {facts.text.tokens:,} tokens in {facts.text.documents:,} documents"),
        ("entries", f"{facts.entries:,}"),
        ("keys", f"{facts.keys}, {facts.width} numbers in {facts.precision}"),
        ("size", f"{format_bytes(facts.bytes)} ({facts.bytes / 1e6:,.1f} MB)"),
        ("model", f"{facts.recipe} ({facts.model[:12]})"),
    ]
    print_table(("", ""), rows)


def print_tuned(folder: str, found: "TuningResult", *, as_json: bool) -> None:
    """The best settings, and how good they are."""
    from manyformer.scores import perplexity

    table = [{**mix._asdict(), "perplexity": perplexity(nats, found.targets).value} for mix, nats in found.nats.items()]
    if as_json:
        print_json({"folder": folder, "on": found.material, "tokens": found.targets, "best": table[0], "all": table})
        return
    rows = [[f"{row['neighbours']:,}", *(f"{row[n]:g}" for n in ("weight", "temperature"))] for row in table[:SHOWN]]
    values = [f"{row['perplexity']:.2f}" for row in table[:SHOWN]]
    headers = ("neighbours", "weight", "temperature", f"perplexity on {found.material}")
    print_table(headers, [(*row, value) for row, value in zip(rows, values)], right=range(4))
    print_result(f"the first of {len(table):,} settings is kept in {folder} ({found.targets:,} tokens)")


def print_scored(run: str, store: "Datastore", found: "DatastoreScores", *, as_json: bool) -> None:
    """Scores side by side."""
    sides = {"alone": (found.alone, found.alone_speed), "datastore": (found.together, found.together_speed)}
    if as_json:
        scores = {
            name: {score.name: score.value for score in one.scores} | {"tokens a second": speed}
            for name, (one, speed) in sides.items()
        }
        facts = {"entries": len(store), "bytes": store.bytes, **found.mix._asdict()}
        print_json({"run": run, "folder": str(store.folder), "on": found.alone.material, **facts, **scores})
        return
    print_result(f"{run} on {found.alone.material}: {found.alone.how}")
    rows = [
        (one.name, f"{one.value:.{one.digits}f}", f"{other.value:.{other.digits}f}")
        for one, other in zip(found.alone.scores, found.together.scores)
    ]
    rows.append(("tokens a second", format_count(found.alone_speed), format_count(found.together_speed)))
    print_table(("score", "model alone", "with datastore"), rows, right=(1, 2))
    mix = f"{found.mix.neighbours:,} neighbours, weight {found.mix.weight:g}, temperature {found.mix.temperature:g}"
    print_result(f"{store.folder}: {len(store):,} entries, {format_bytes(store.bytes)}; {mix}")


def print_looked(store: "Datastore", found: "PromptNeighbours", *, as_json: bool) -> None:
    """The likeliest next tokens and the nearest contexts."""
    if as_json:
        neighbours = [one._asdict() for one in found.neighbours]
        print_json(
            {"prompt": found.prompt, "guesses": [one._asdict() for one in found.guesses], "neighbours": neighbours}
        )
        return
    guesses = [(_shown(g.token), *(f"{p:.1%}" for p in (g.both, g.model, g.neighbours))) for g in found.guesses]
    print_table(("next token", "together", "model", "neighbours"), guesses, right=(1, 2, 3))
    print_result()
    rows = [
        (
            f"{one.distance:.3f}",
            f"{one.share:.1%}",
            f"{one.entry:,}",
            f"…{_shown(one.context)}",
            _shown(one.token),
            _shown(one.continuation),
        )
        for one in found.neighbours
    ]
    print_table(("distance", "share", "entry", "context", "followed by", "and then"), rows, right=(0, 1, 2, 3))
    print_result(f"from {store.facts.source}")


def _shown(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
