"""ListOps by the rules of the Long Range Arena."""

from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import final

import numpy as np

from manyformer.config.data_sections import ListOpsData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    PADDING_SYMBOL,
    SyntheticRows,
    SyntheticRule,
    register_rule,
)
from manyformer.errors import UserError

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
    ordered, middle = sorted(arguments), len(arguments) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


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
        count, operation = source.randint(2, self.data.max_args), source.randint(MINIMUM, SUM)
        tokens.append(operation)
        if len(tokens) + count >= self.length:
            raise _TooLong
        arguments = [self._add_argument(source, depth + 1, tokens) for _ in range(count)]
        tokens.append(END)
        return apply_operation(operation, arguments)

    def shortcuts(self, rows: SyntheticRows) -> Mapping[str, Sequence[Hashable]]:
        """What a model knows that reads the first token, the digits directly under it, and the operations there."""
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
    depth, arguments = 0, list[int]()
    for token in tokens[1:-1]:
        if depth == 0 and token != END:
            arguments.append(token)
        depth += (MINIMUM <= token <= SUM) - (token == END)
    return tokens[0], arguments


def _value_of_digits(operation: int, arguments: list[int]) -> int | None:
    """The operation on those of its arguments that are digits; None without any."""
    digits = [part for part in arguments if part < 10]
    return apply_operation(operation, digits) if digits else None
