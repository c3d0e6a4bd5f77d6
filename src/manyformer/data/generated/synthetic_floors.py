"""Baselines of generated tasks (floors): the accuracy of guesses without a model, below which a score shows nothing."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.config import DataSection, SyntheticData
from manyformer.data.batching.epochs import FIXED_SEED, random_generator
from manyformer.data.generated.synthetic import SyntheticRows, make_rule

BoolArray = NDArray[np.bool_]

# Distinguishes the rows that floors are measured on from held-out ones.
_FLOOR_SEED = 2

ROWS_PER_CHUNK = 64
"""Rows that are generated at a time."""

MAX_NEIGHBOUR_ROWS = 2_000
"""The most rows of each half that nearest neighbours are searched among."""

TABLE_EXAMPLES = 1_000
"""Generated examples for the floors beside the scores of models."""

N_GRAMS = (1, 2, 3)
"""Numbers of last symbols that n-gram floors know."""


class TaskFloor(NamedTuple):
    """The accuracy of a guess in percent, its standard error, and the number of targets that it was measured on."""

    name: str
    accuracy: float
    standard_error: float
    targets: int


def measure_floors(data: SyntheticData, examples: int = 2_000) -> list[TaskFloor]:
    """The floors of a rule on generated examples: what is known is counted on one half, and scored on the other.

    Chance, the most frequent answer, n-grams of the last symbols, the symbol that followed the last occurrence of the
    present one in the row, the nearest neighbour (for one target in each row), and the shortcuts that the rule names.
    Raises UserError for fewer than four examples, and if nothing is scored in one half."""
    if examples < 4:
        raise UserError(f"floors need at least 4 examples, got {examples}")
    rule = make_rule(data)
    counts = [min(ROWS_PER_CHUNK, examples - start) for start in range(0, examples, ROWS_PER_CHUNK)]
    chunks = [
        rule.rows(random_generator(FIXED_SEED, data.seed, _FLOOR_SEED, number), count)
        for number, count in enumerate(counts)
    ]
    rows = SyntheticRows(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))
    row_numbers, columns = np.nonzero(rows.targets >= 0)
    targets = rows.targets[row_numbers, columns]
    # whole rows: what was counted in a row must not be scored in it
    is_counted = row_numbers < examples // 2
    if is_counted.all() or not is_counted.any():
        raise UserError("half of the examples have nothing that is scored; measure floors on more examples")
    scored = targets[~is_counted]
    # knowing the same of every target is knowing nothing
    guesses: dict[str, Sequence[Hashable]] = {"majority": [0] * len(targets)}
    guesses |= dict(_n_grams(rows.symbols, row_numbers, columns)) | dict(rule.shortcuts(rows))
    floors = [TaskFloor("chance", 100 / len(np.unique(targets)), 0.0, len(scored))]
    floors += [_floor(name, _table_hits(keys, targets, is_counted)) for name, keys in guesses.items()]
    followed = _followers(rows.symbols, row_numbers, columns)[~is_counted]
    floors.append(_floor("last follower in the row", followed == scored))
    # with one target a row, the nearest row answers for it
    if len(targets) == examples:
        floors.append(_floor("nearest neighbour", _neighbour_hits(rows.symbols, targets, is_counted)))
    return floors


class GuessFloors(NamedTuple):
    """The baselines of a rule that tables of scores show: the most frequent answer, and the best other guess."""

    majority: TaskFloor
    shortcut: TaskFloor

    @property
    def summary_line(self) -> str:
        """A sentence with both baselines."""
        return (
            f"guesses without a model: the majority {self.majority.accuracy:.1f} %, "
            f"{self.shortcut.name} {self.shortcut.accuracy:.1f} %"
        )


def guess_floors(data: DataSection) -> GuessFloors | None:
    """The floors of generated data, of those that `measure_floors` finds on 1,000 examples; None for other data."""
    if not isinstance(data, SyntheticData):
        return None
    _, majority, *shortcuts = measure_floors(data, TABLE_EXAMPLES)
    return GuessFloors(majority, max(shortcuts, key=lambda floor: floor.accuracy))


def _floor(name: str, hits: BoolArray) -> TaskFloor:
    share = float(hits.mean())
    return TaskFloor(name, 100 * share, 100 * (share * (1 - share) / len(hits)) ** 0.5, len(hits))


def _n_grams(symbols: IntArray, rows: IntArray, columns: IntArray) -> Iterator[tuple[str, list[int]]]:
    """The last 1, 2 and 3 symbols at each target, as one number."""
    base = int(symbols.max()) + 2
    codes = np.zeros(len(rows), np.int64)
    for back in range(max(N_GRAMS)):
        # padding, and what is before the row, is symbol -1
        present = np.where(columns >= back, symbols[rows, np.maximum(columns - back, 0)], -1)
        # the last symbols as the digits of one number
        codes = codes * base + present + 1
        if back + 1 in N_GRAMS:
            yield f"last {back + 1} symbols" if back else "last symbol", codes.tolist()


def _table_hits(keys: Sequence[Hashable], targets: IntArray, is_counted: BoolArray) -> BoolArray:
    """Whether each target is the most frequent one for its key, or of all where the key never occurred."""
    tables: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    total = Counter[int](targets[is_counted].tolist())
    for key, target, counted in zip(keys, targets.tolist(), is_counted.tolist(), strict=True):
        if counted:
            tables[key][target] += 1
    best = {key: table.most_common(1)[0][0] for key, table in tables.items()}
    majority = total.most_common(1)[0][0]
    guesses = [best.get(key, majority) for key, counted in zip(keys, is_counted.tolist()) if not counted]
    hits: BoolArray = np.array(guesses) == targets[~is_counted]
    return hits


def _followers(symbols: IntArray, rows: IntArray, columns: IntArray) -> IntArray:
    """The symbol that followed the last earlier occurrence of the symbol at each target; -1 without one."""
    guesses = np.full(len(rows), -1)
    # where the targets of each row begin
    order = np.flatnonzero(np.diff(rows, prepend=-1))
    for start, stop in zip(order, [*order[1:], len(rows)], strict=True):
        row = symbols[rows[start]].tolist()
        last = dict[int, int]()
        position = 0
        for target in range(start, stop):
            # the row is read up to the target once, whatever the number of its targets
            while position < columns[target]:
                last[row[position]] = position + 1
                position += 1
            place = last.get(row[position])
            guesses[target] = -1 if place is None else row[place]
    return guesses


def _neighbour_hits(symbols: IntArray, targets: IntArray, is_counted: BoolArray) -> BoolArray:
    """Whether each target is that of the counted row that differs in the fewest positions."""
    counted = np.flatnonzero(is_counted)[:MAX_NEIGHBOUR_ROWS]
    scored = np.flatnonzero(~is_counted)[:MAX_NEIGHBOUR_ROWS]
    hits = [
        targets[counted[(symbols[counted] != symbols[row]).sum(axis=1).argmin()]] == targets[row]
        for row in scored.tolist()
    ]
    return np.array(hits)
