"""The base of rules that generate sequences of tasks with known answers, and their registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.config import SyntheticData
from manyformer.config.data_sections import register_rule_section
from manyformer.data.batching.epochs import random_generator

# Distinguishes the random stream of the rule from those of the rows.
_RULE_SEED = 1_009

PADDING_SYMBOL = -1
"""The symbol behind the end of a sequence that is shorter than its row."""

NOT_SCORED = -1
"""The target of a position that is not scored."""

SectionT = TypeVar("SectionT", bound=SyntheticData)


class SyntheticRows(NamedTuple):
    """Rows of symbols, numbered from 0, with the target at each.

    Padding follows the end of a row that is shorter (`PADDING_SYMBOL`); a target below 0 is not scored."""

    symbols: IntArray
    targets: IntArray


class SyntheticRule(ABC, Generic[SectionT]):
    """Generates rows of symbols and targets; all their randomness comes from the given generator.

    `data` are the settings of the rule, `length` the number of tokens in a sequence. What is the same in all rows, such
    as a table, is drawn from `rule_generator` in the constructor."""

    def __init__(self, data: SectionT) -> None:
        self.data = data
        self.length = data.sequence_length
        self.symbols = data.alphabet

    @abstractmethod
    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        """Generate `count` rows of `length` symbols each."""

    @abstractmethod
    def describe(self) -> str:
        """A description for display: the rule and the best possible loss."""

    def shortcuts(self, rows: SyntheticRows) -> Mapping[str, Sequence[Hashable]]:
        """Features that may give targets away without the rule: by name, a value for each scored target, row by row."""
        return {}

    def rule_generator(self) -> np.random.Generator:
        """The random generator of what all rows have in common, which `data.seed` decides."""
        # not from the generator of rows, which differs from batch to batch
        return random_generator(self.data.seed, _RULE_SEED)


def distinct_draws(random: np.random.Generator, choices: int, shape: tuple[int, int]) -> IntArray:
    """Numbers below `choices`, (rows, columns) of `shape`: in each row all differ, in random order."""
    rows, draws = shape
    # the smallest of random keys are a draw without replacement, for all rows at once
    keys = random.random((rows, choices))
    smallest = keys.argpartition(max(0, draws - 1), axis=1)[:, :draws]
    # the columns that partition leaves are in no random order
    return random.permuted(smallest, axis=1)


RULES: dict[str, type[SyntheticRule[Any]]] = {}
"""The registered rules by the name of `data.rule`."""

RuleT = TypeVar("RuleT", bound=type[SyntheticRule[Any]])


def register_rule(section: type[SyntheticData]) -> Callable[[RuleT], RuleT]:
    """A decorator that adds a rule with the class of its settings. Raises UserError if the name is taken."""

    def register(rule: RuleT) -> RuleT:
        register_rule_section(section)
        name = section.model_fields["rule"].default
        if RULES.setdefault(name, rule) is not rule:
            raise UserError(f"data.rule={name} is registered twice; rename one of the two rules")
        return rule

    return register


@final
class NextInputRule(SyntheticRule[SyntheticData]):
    """The rows of another rule, with the next symbol of the row as the target at each, as in pretraining."""

    def __init__(self, rule: SyntheticRule[Any]) -> None:
        super().__init__(rule.data)
        self.rule = rule
        self.symbols = rule.symbols

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        symbols = self.rule.rows(random, count).symbols
        # a symbol of padding is no target: both are negative
        last = np.full_like(symbols[:, :1], NOT_SCORED)
        return SyntheticRows(symbols, np.concatenate([symbols[:, 1:], last], axis=1))

    def describe(self) -> str:
        return f"the inputs of the rule {self.data.rule}, of which each next one is predicted: {self.rule.describe()}"


def make_rule(data: SyntheticData) -> SyntheticRule[Any]:
    """The rule with these settings."""
    rule = RULES[data.rule](data)
    if data.targets == "inputs":
        return NextInputRule(rule)
    return rule
