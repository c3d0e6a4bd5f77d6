"""How the datastore commands speak: a bar while they work, then what a person or a script wants to know."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from manyformer.cli.console import count, note, say, say_json, say_table, size
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.datastore import Datastore, Facts
    from manyformer.datastore.scoring import Scored
    from manyformer.datastore.showing import Looked
    from manyformer.datastore.tuning import Tuned

N = TypeVar("N", int, float)

QUIET = 10.0
"""Seconds between lines where nobody watches."""

SHOWN = 12
"""Settings in the table of a tuning."""


class Bar:
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
            note("the same command goes on where this one was")

    def announce(self, facts: "Facts") -> None:
        """What it will be, before it begins."""
        line = (
            f"{facts.entries:,} entries of {facts.width} numbers in {facts.precision}: {size(facts.bytes)} on the disk"
        )
        if self._bar is None:
            note(line)
        else:
            self._bar.console.print(line)

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if self.first is None:
            # what an earlier process did is no measure of this one
            self.first, self.begun = done, now
        rate = (done - self.first) / (now - self.begun) if now > self.begun else 0.0
        told = f"{count(done)} of {count(of)} {self.unit}, {count(rate)}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of, told=told)
        elif now - self.told > QUIET:
            left = f", {(of - done) / rate:,.0f} s left" if rate else ""
            note(f"{self.what}: {told}{left}")
            self.told = now


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """The numbers of an option such as `0.1,1,10`. Raises UserError."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' must be numbers with commas between them, such as 1,10,100") from None


def print_facts(folder: str, facts: "Facts", *, done: bool, as_json: bool) -> None:
    """What a datastore is or will be."""
    if as_json:
        say_json({"folder": folder, "done": done, "bytes": facts.bytes, **facts.json()})
        return
    rows = [
        ("datastore", folder if done else f"{folder} (nothing is written yet)"),
        ("text", f"{facts.source}: {facts.text.tokens:,} tokens in {facts.text.documents:,} documents"),
        ("entries", f"{facts.entries:,}"),
        ("keys", f"{facts.keys}, {facts.width} numbers in {facts.precision}"),
        ("size", f"{size(facts.bytes)} ({facts.bytes / 1e6:,.1f} MB)"),
        ("model", f"{facts.recipe} ({facts.model[:12]})"),
    ]
    say_table(("", ""), rows)


def print_tuned(folder: str, found: "Tuned", *, as_json: bool) -> None:
    """The best settings, and how good they are."""
    from manyformer.scores import perplexity

    table = [{**mix._asdict(), "perplexity": perplexity(nats, found.targets).value} for mix, nats in found.nats.items()]
    if as_json:
        say_json({"folder": folder, "on": found.material, "tokens": found.targets, "best": table[0], "all": table})
        return
    rows = [[f"{row['neighbours']:,}", *(f"{row[n]:g}" for n in ("weight", "temperature"))] for row in table[:SHOWN]]
    values = [f"{row['perplexity']:.2f}" for row in table[:SHOWN]]
    headers = ("neighbours", "weight", "temperature", f"perplexity on {found.material}")
    say_table(headers, [(*row, value) for row, value in zip(rows, values)], right=range(4))
    say(f"the first of {len(table):,} settings is kept in {folder} ({found.targets:,} tokens)")


def print_scored(run: str, store: "Datastore", found: "Scored", *, as_json: bool) -> None:
    """Scores side by side."""
    sides = {"alone": (found.alone, found.alone_speed), "datastore": (found.together, found.together_speed)}
    if as_json:
        scores = {
            name: {score.name: score.value for score in one.scores} | {"tokens a second": speed}
            for name, (one, speed) in sides.items()
        }
        facts = {"entries": len(store), "bytes": store.bytes, **found.mix._asdict()}
        say_json({"run": run, "folder": str(store.folder), "on": found.alone.material, **facts, **scores})
        return
    say(f"{run} on {found.alone.material}: {found.alone.how}")
    rows = [
        (one.name, f"{one.value:.{one.digits}f}", f"{other.value:.{other.digits}f}")
        for one, other in zip(found.alone.scores, found.together.scores)
    ]
    rows.append(("tokens a second", count(found.alone_speed), count(found.together_speed)))
    say_table(("score", "model alone", "with datastore"), rows, right=(1, 2))
    mix = f"{found.mix.neighbours:,} neighbours, weight {found.mix.weight:g}, temperature {found.mix.temperature:g}"
    say(f"{store.folder}: {len(store):,} entries, {size(store.bytes)}; {mix}")


def print_looked(store: "Datastore", found: "Looked", *, as_json: bool) -> None:
    """The likeliest next tokens and the nearest contexts."""
    if as_json:
        neighbours = [one._asdict() for one in found.neighbours]
        say_json(
            {"prompt": found.prompt, "guesses": [one._asdict() for one in found.guesses], "neighbours": neighbours}
        )
        return
    guesses = [(_shown(g.token), *(f"{p:.1%}" for p in (g.both, g.model, g.neighbours))) for g in found.guesses]
    say_table(("next token", "together", "model", "neighbours"), guesses, right=(1, 2, 3))
    say()
    rows = [
        (
            f"{one.distance:.3f}",
            f"{one.share:.1%}",
            f"{one.entry:,}",
            f"…{_shown(one.before)}",
            _shown(one.token),
            _shown(one.after),
        )
        for one in found.neighbours
    ]
    say_table(("distance", "share", "entry", "context", "followed by", "and then"), rows, right=(0, 1, 2, 3))
    say(f"from {store.facts.source}")


def _shown(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
