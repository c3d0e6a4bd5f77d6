"""Rules whose answers follow from a structure: nested lists (ListOps), automata, drawn paths (Pathfinder)."""

import math
from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import NamedTuple, final

import numpy as np

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import FloatArray, IntArray
from manyformer.config.data_sections import ListOpsData, PathfinderData, RegularLanguageData
from manyformer.data.generated.synthetic.synthetic_rule import (
    NOT_SCORED,
    PADDING_SYMBOL,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)

MINIMUM, MAXIMUM, MEDIAN, SUM, END = range(10, 15)
"""The symbols behind the ten digits: four operations with an opening bracket, and the closing one."""

OPERATION_SHARE = 0.25
"""The probability that an argument is an operation and not a digit."""

MAX_TRIES = 100_000
"""The most expressions that are drawn for one of the right length."""


class _TooLong(Exception):
    """The expression has more tokens than a row."""


def apply_operation(operation: int, arguments: Sequence[int]) -> int:
    """The value of an operation; a median between two digits is rounded down."""
    if operation == MINIMUM:
        return min(arguments)
    if operation == MAXIMUM:
        return max(arguments)
    if operation == SUM:
        return sum(arguments) % 10
    ordered = sorted(arguments)
    middle = len(arguments) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


@register_rule(ListOpsData)
@final
class ListOpsRule(SyntheticRule[ListOpsData]):
    """Nested operations on digits (Nangia and Bowman 2018; Tay et al. 2021, section 2.2).

    As in the authors' generator: an argument is an operation with a probability of 1/4, down to the largest depth; each
    has 2 to `max_args` arguments; expressions of other lengths are drawn again, and parentheses are dropped. Rows are
    new at every step, where theirs are 96,000 of a file."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        source = Random(int(random.integers(1 << 62)))
        symbols = np.full((count, self.length), PADDING_SYMBOL)
        targets = np.full_like(symbols, NOT_SCORED)
        for row in range(count):
            tokens, value = self._expression(source)
            symbols[row, : len(tokens)] = tokens
            targets[row, len(tokens) - 1] = value
        return SyntheticRows(symbols, targets)

    def _expression(self, source: Random) -> tuple[list[int], int]:
        # drawn again until the length fits, as in the authors' generator
        for _ in range(MAX_TRIES):
            tokens = list[int]()
            try:
                value = self._add_argument(source, 1, tokens)
            except _TooLong:
                continue
            if self.data.min_tokens < len(tokens) < self.length:
                return tokens, value
        raise UserError(
            f"none of {MAX_TRIES:,} expressions has more than {self.data.min_tokens} tokens and fewer than "
            f"{self.length}; set data.min_tokens lower, or data.depth, data.max_args or data.length higher"
        )

    def _add_argument(self, source: Random, depth: int, tokens: list[int]) -> int:
        """Add the tokens of an argument and return its value."""
        if depth >= self.data.depth or source.random() > OPERATION_SHARE:
            tokens.append(digit := source.randrange(10))
            return digit
        count = source.randint(2, self.data.max_args)
        operation = source.randint(MINIMUM, SUM)
        tokens.append(operation)
        # given up early: each argument has a token at least
        if len(tokens) + count >= self.length:
            raise _TooLong
        arguments = [self._add_argument(source, depth + 1, tokens) for _ in range(count)]
        tokens.append(END)
        return apply_operation(operation, arguments)

    def shortcuts(self, rows: SyntheticRows) -> Mapping[str, Sequence[Hashable]]:
        """Features of the first token, the digits directly under it, and the operations there."""
        roots = [_top_level(tokens[tokens >= 0].tolist()) for tokens in rows.symbols]
        with_digits = [(root, _value_of_digits(root, below), sum(part > 9 for part in below)) for root, below in roots]
        with_operations = [
            (root, _value_of_digits(root, below), frozenset(part for part in below if part > 9))
            for root, below in roots
        ]
        return {
            "root operator": [root for root, _ in roots],
            "root operator, digits under it": with_digits,
            "root operator, digits and operators under it": with_operations,
        }

    def describe(self) -> str:
        tokens = f"{self.data.min_tokens + 1} to {self.length - 1} tokens, depth up to {self.data.depth}"
        return f"ListOps expressions of {tokens}; all values are predictable"


def _top_level(tokens: list[int]) -> tuple[int, list[int]]:
    """The operation of an expression, and the first token of each of its arguments; for a digit, it and nothing."""
    depth = 0
    arguments = list[int]()
    for token in tokens[1:-1]:
        if depth == 0 and token != END:
            arguments.append(token)
        depth += (MINIMUM <= token <= SUM) - (token == END)
    return tokens[0], arguments


def _value_of_digits(operation: int, arguments: list[int]) -> int | None:
    """The operation on those of its arguments that are digits; None without any."""
    digits = [part for part in arguments if part < 10]
    if digits:
        return apply_operation(operation, digits)
    return None


@register_rule(RegularLanguageData)
@final
class RegularLanguageRule(SyntheticRule[RegularLanguageData]):
    """Strings of a probabilistic automaton, with a mark after each (RegBench, Akyurek et al. 2024, section 3).

    Each row has an automaton of its own: in each state some symbols may follow, all equally likely, each of which leads
    to another state; strings begin in state 0 and end after a length drawn uniformly. The paper counts a
    prediction as right if the automaton allows it. Where just one symbol is allowed that is accuracy, and these
    positions are those of `scored: forced`."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        data = self.data
        number = np.arange(count)
        shape = (count, data.max_states, data.edges)
        states = random.integers(data.min_states, data.max_states + 1, size=(count, 1))
        edges = random.integers(1, np.minimum(data.edges, states - 1) + 1, size=shape[:2])
        labels = distinct_draws(random, data.symbols, (count * data.max_states, data.edges)).reshape(shape)
        successors = self._successors(random, states)
        state = np.zeros(count, np.int64)
        left = np.zeros((count, data.max_states), bool)
        remaining = random.integers(1, data.max_string + 1, size=count)
        symbols = np.empty((count, self.length + 1), np.int64)
        forced = np.zeros((count, self.length + 1), bool)
        # all rows walk through their automata together
        for column in range(self.length + 1):
            ends = remaining == 0
            edge = random.integers(edges[number, state])
            symbols[:, column] = np.where(ends, data.symbols, labels[number, state, edge])
            forced[:, column] = (edges[number, state] == 1) & left[number, state] & ~ends
            # a transition can be known only if the state was left before in this row
            left[number, state] |= ~ends
            state = np.where(ends, 0, successors[number, state, edge])
            remaining = np.where(ends, random.integers(1, data.max_string + 1, size=count), remaining - 1)
        targets = symbols[:, 1:].copy()
        if data.scored == "forced":
            targets[~forced[:, 1:]] = NOT_SCORED
        return SyntheticRows(symbols[:, :-1].copy(), targets)

    def _successors(self, random: np.random.Generator, states: IntArray) -> IntArray:
        """For each row and state, states in random order: those that the row has first, and the own state last."""
        every = np.arange(self.data.max_states)
        keys = random.random((len(states), len(every), len(every)))
        keys += (every >= states)[:, None, :] + 2 * (every[:, None] == every)
        return keys.argsort(axis=2)[:, :, : self.data.edges]

    def describe(self) -> str:
        data = self.data
        states = f"{data.min_states} to {data.max_states} states"
        return f"strings of random automata with {states} and 1 to {data.edges} of {data.symbols} symbols in each"


DASH = 2.0
GAP = 1.2
THICKNESS = 0.7
RADIUS = 1.8
MARGIN = 2.0
"""Length of a dash, distance to the next one, thickness, radius of a disk, distance between paths; all in pixels."""

BEND = 0.7
"""The most that a path turns between dashes, in radians."""

TRIES_PER_DASH = 8
TRIES_PER_DISTRACTOR = 4

Point = tuple[float, float]
Disks = tuple[Point, Point]


class _Dash(NamedTuple):
    start: Point
    stop: Point

    @property
    def middle(self) -> Point:
        """The point between both ends."""
        return (self.start[0] + self.stop[0]) / 2, (self.start[1] + self.stop[1]) / 2


@register_rule(PathfinderData)
@final
class PathfinderRule(SyntheticRule[PathfinderData]):
    """Images of two disks, two long dashed paths and shorter ones (Linsley et al. 2018, section 2; Tay et al. 2021).

    The disks are at both ends of one path (answer 1), or at an end of each (answer 0), in half of the images each. Both
    pairs of ends are equally far from each other in every image, so that the distance tells nothing. Redrawn with lines
    of our own, in the image's own resolution: accuracies are comparable with each other, not with published ones."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        source = Random(int(random.integers(1 << 62)))
        symbols = np.empty((count, self.length), np.int64)
        targets = np.full_like(symbols, NOT_SCORED)
        for row in range(count):
            answer = source.randrange(2)
            symbols[row] = self._image(source, answer)
            targets[row, -1] = answer
        return SyntheticRows(symbols, targets)

    def _image(self, source: Random, answer: int) -> IntArray:
        while True:
            first = self._path(source, self.data.dashes, [])
            if first:
                second = self._path(source, self.data.dashes, first)
            else:
                second = []
            # drawn again: the distance of the disks must not tell the answer
            if second and (choices := _equidistant_pairs(first, second)):
                break
        dashes = [*first, *second]
        for _ in range(self.data.distractors):
            for _ in range(TRIES_PER_DISTRACTOR):
                if path := self._path(source, max(1, self.data.dashes // 3), dashes):
                    dashes += path
                    break
        same_path, mixed_paths = source.choice(choices)
        return self._draw(dashes, same_path if answer else mixed_paths)

    def _path(self, source: Random, length: int, obstacles: list[_Dash]) -> list[_Dash]:
        """Dashes that keep away from obstacles, from each other and from the border; empty if they find no place."""
        size = self.data.size
        path = list[_Dash]()
        point = (source.uniform(3, size - 3), source.uniform(3, size - 3))
        angle = source.uniform(0, 2 * math.pi)
        # dashes next to each other are closer than the margin
        occupied = [point for dash in obstacles for point in (dash.start, dash.middle, dash.stop)]
        for _ in range(length):
            path_points = [point for dash in path[:-1] for point in (dash.start, dash.middle, dash.stop)]
            for _ in range(TRIES_PER_DASH):
                turned = angle + source.uniform(-BEND, BEND)
                direction = math.cos(turned), math.sin(turned)
                stop = point[0] + DASH * direction[0], point[1] + DASH * direction[1]
                dash = _Dash(point, stop)
                if self._is_inside(stop) and _is_clear(dash, occupied) and _is_clear(dash, path_points):
                    break
            else:
                return []
            path.append(dash)
            angle = turned
            point = stop[0] + GAP * direction[0], stop[1] + GAP * direction[1]
        return path

    def _is_inside(self, point: Point) -> bool:
        return all(2.0 <= coordinate <= self.data.size - 3.0 for coordinate in point)

    def _draw(self, dashes: list[_Dash], disks: Disks) -> IntArray:
        """The brightness level of each pixel, row by row."""
        size = self.data.size
        rows, columns = np.divmod(np.arange(size * size), size)
        pixels = np.stack([rows, columns], axis=1).astype(float)
        starts, stops = (np.array([dash[end] for dash in dashes]) for end in (0, 1))
        along = stops - starts
        # the nearest point of each dash to each pixel (pixels, dashes)
        share = ((pixels[:, None] - starts) * along).sum(-1) / (along**2).sum(-1)
        nearest = starts + share.clip(0, 1)[..., None] * along
        lines = _coverage(np.linalg.norm(pixels[:, None] - nearest, axis=-1).min(1), THICKNESS)
        to_disk = np.linalg.norm(pixels[:, None] - np.array(disks), axis=-1).min(1)
        brightness = np.maximum(lines, _coverage(to_disk, RADIUS))
        levels: IntArray = np.rint(brightness * (self.data.levels - 1)).astype(np.int64)
        return levels

    def shortcuts(self, rows: SyntheticRows) -> Mapping[str, Sequence[Hashable]]:
        """Features of an image: its mean brightness in twenty classes, and the distance of its disks in pixels."""
        means = rows.symbols.mean(axis=1)
        edges = np.quantile(means, np.linspace(0, 1, 21)[1:-1])
        images = rows.symbols.reshape(-1, self.data.size, self.data.size)
        return {
            "mean brightness": np.searchsorted(edges, means).tolist(),
            "distance of the disks": [_disk_distance(image) for image in images],
        }

    def describe(self) -> str:
        data = self.data
        return f"images of {data.size} x {data.size} with two paths of {data.dashes} dashes; does one join the disks?"


def _equidistant_pairs(first: list[_Dash], second: list[_Dash]) -> list[tuple[Disks, Disks]]:
    """Pairs of disks at equal distances: at both ends of one path, and at one end of each path."""
    ends = [(path[0].start, path[-1].stop) for path in (first, second)]
    mixed = [(end, other_end) for end in ends[0] for other_end in ends[1]]
    return [(same, pair) for same in ends for pair in mixed if abs(math.dist(*same) - math.dist(*pair)) < 0.5]


def _disk_distance(image: IntArray) -> int:
    """The distance of the two squares of 4 x 4 pixels that are brightest and apart, which are the disks."""
    squares = np.lib.stride_tricks.sliding_window_view(image, (4, 4)).sum(axis=(2, 3))
    row, column = np.unravel_index(squares.argmax(), squares.shape)
    remaining = squares.copy()
    remaining[max(0, row - 3) : row + 4, max(0, column - 3) : column + 4] = -1
    other_row, other_column = np.unravel_index(remaining.argmax(), remaining.shape)
    return round(math.hypot(row - other_row, column - other_column))


def _is_clear(dash: _Dash, occupied: list[Point]) -> bool:
    """Whether no point of the dash is within the margin of an occupied one."""
    return all(
        (point[0] - taken[0]) ** 2 + (point[1] - taken[1]) ** 2 >= MARGIN**2
        for point in (dash.middle, dash.stop)
        for taken in occupied
    )


def _coverage(distance: FloatArray, radius: float) -> FloatArray:
    """The approximate share of a pixel within `radius` of a line or point, by the distance of its center."""
    return (radius + 0.5 - distance).clip(0, 1)
