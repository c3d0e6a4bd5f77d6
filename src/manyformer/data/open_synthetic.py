"""Opening sequences that a rule makes: nothing is read or kept, every batch follows from a few numbers."""

import json
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch

from manyformer.batches import IGNORE, TextBatch
from manyformer.config import SyntheticData
from manyformer.data.characters import Characters
from manyformer.data.opened import Data, Span, amount
from manyformer.data.plan import FIXED, Epoch, Held, Plan, Units, generator
from manyformer.data.rules import RULES, Rule
from manyformer.data.sampler import Sampler
from manyformer.data.saved import Tokenizers
from manyformer.data.tokenizer import SPECIALS
from manyformer.errors import UserError

BATCHES = 1000
"""The batches of an epoch, all of them new: a word for limits and orders, since there is no text to pass over."""


class Shape(NamedTuple):
    """Which rows are made: so many batches of so many rows, of which the last `scored` targets count."""

    batches: int
    rows: int
    scored: int


@final
class RuleEpoch(Epoch):
    """Batches that follow from `seeds` and their number."""

    def __init__(self, rule: Rule, shape: Shape, seeds: tuple[int, ...]) -> None:
        self._rule, self._shape, self._seeds = rule, shape, seeds

    def __len__(self) -> int:
        return self._shape.batches

    def batch(self, number: int) -> TextBatch:
        made = self._rule.rows(generator(*self._seeds, number), self._shape.rows)
        targets = np.where(made.targets < 0, IGNORE, made.targets + len(SPECIALS))
        targets[:, : self._rule.length - self._shape.scored] = IGNORE
        return TextBatch(torch.from_numpy(made.symbols + len(SPECIALS)), torch.from_numpy(targets))


@final
class RulePlan(Plan):
    """Epochs of new rows for ever."""

    def __init__(self, rule: Rule, rows: int, fingerprint: str) -> None:
        self._rule, self._shape = rule, Shape(BATCHES, rows, rule.length)
        self.fingerprint = f"{fingerprint}-{rows}"

    def epoch(self, seed: int, number: int) -> RuleEpoch:
        return RuleEpoch(self._rule, self._shape, (seed, number))


def open_synthetic(data: SyntheticData, *, batch_tokens: int, cache: Path, seed: int) -> Data:
    """Sequences by the rule of `data.task`, for a language model."""
    if batch_tokens < data.length:
        raise UserError(
            f"batch.tokens is {batch_tokens}, less than one row of {data.length} (data.length); set it to that or more"
        )
    rule, rows = RULES[data.task](data), batch_tokens // data.length
    # symbols are letters, so that models can be let write; more than 26 go on with other scripts' letters
    letters = [chr(ord("a") + n if n < 26 else 0x100 + n) for n in range(data.symbols)]
    made = json.dumps(data.model_dump(exclude={"valid", "context"}), sort_keys=True)
    held = {name: _held(rule, data, rows, number) for number, name in enumerate(("valid", "test"))}
    tokenizer = Characters(letters)
    return Data(
        task="language-model",
        tokenizers=Tokenizers(tokenizer, tokenizer),
        train=Sampler(RulePlan(rule, rows, made), seed),
        valid=held["valid"],
        test=held["test"],
        lines=tuple(_lines(data, rule)),
        spans=(Span(data.length, "a row (data.length)", "set data.length to that or less"),),
        cache=cache,
    )


def _held(rule: Rule, data: SyntheticData, rows: int, number: int) -> Held:
    """The same rows for every run; `number` tells validation from test data."""
    batches = max(1, round(data.valid / (rows * data.length)))
    shape = Shape(batches, rows, data.length - int(data.context * data.length))
    epoch = RuleEpoch(rule, shape, (FIXED, data.seed, number))
    targets = sum(int((epoch.batch(one).targets != IGNORE).sum()) for one in range(batches))
    # a symbol is a letter: as many characters and bytes as targets
    return Held(epoch, Units(targets, targets, targets))


def _lines(data: SyntheticData, rule: Rule) -> list[str]:
    scored = f", the last {data.length - int(data.context * data.length)} scored" if data.context else ""
    return [
        f"synthetic: {rule.describe()}",
        f"rows of {data.length} tokens, always new; held out: {amount(data.valid, 'tokens')}{scored}",
    ]
