"""Opening sequences that a rule makes: nothing is read or kept, every batch follows from a few numbers."""

import json
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch

from manyformer.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.config import SyntheticData
from manyformer.data.characters import CharTokenizer
from manyformer.data.epochs import FIXED, Epoch, EpochPlan, HeldOutBatches, TextUnits, generator
from manyformer.data.opened import LengthLimit, OpenedData, human_amount
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.synthetic_rules import RULES, SyntheticRule
from manyformer.data.tokenizer import SPECIALS
from manyformer.errors import UserError

BATCHES = 1000
"""The batches of an epoch, all of them new: a word for limits and orders, since there is no text to pass over."""


class SyntheticShape(NamedTuple):
    """Which rows are made: so many batches of so many rows.

    Sequences are cut into `parts` rows, which follow each other in as many batches; of each sequence the last `scored`
    targets count.
    """

    batches: int
    rows: int
    scored: int
    parts: int = 1


@final
class RuleEpoch(Epoch):
    """Batches that follow from `seeds` and their number; `first` is the number of the first sequence of a row."""

    def __init__(self, rule: SyntheticRule, shape: SyntheticShape, seeds: tuple[int, ...], first: int = 0) -> None:
        self._rule, self._shape, self._seeds, self._first = rule, shape, seeds, first
        self.goes_on = shape.parts > 1

    def __len__(self) -> int:
        return self._shape.batches

    def batch(self, number: int) -> CausalLMBatch:
        sequence, part = divmod(number, self._shape.parts)
        made = self._rule.rows(generator(*self._seeds, sequence), self._shape.rows)
        targets = np.where(made.targets < 0, IGNORE_INDEX, made.targets + len(SPECIALS))
        targets[:, : self._rule.length - self._shape.scored] = IGNORE_INDEX
        length = self._rule.length // self._shape.parts
        columns = slice(part * length, (part + 1) * length)
        symbols, wanted = (torch.from_numpy(x[:, columns].copy()) for x in (made.symbols + len(SPECIALS), targets))
        return CausalLMBatch(
            symbols, wanted, torch.full_like(symbols, self._first + sequence) if self.goes_on else None
        )


@final
class RulePlan(EpochPlan):
    """Epochs of new rows for ever."""

    def __init__(self, rule: SyntheticRule, rows: int, parts: int, fingerprint: str) -> None:
        self._rule, self._shape = rule, SyntheticShape(max(1, BATCHES // parts) * parts, rows, rule.length, parts)
        self.fingerprint = f"{fingerprint}-{rows}"

    def epoch(self, seed: int, number: int) -> RuleEpoch:
        return RuleEpoch(self._rule, self._shape, (seed, number), number * BATCHES)


def open_synthetic(data: SyntheticData, *, batch_tokens: int, cache: Path, seed: int) -> OpenedData:
    """Sequences by the rule of `data.task`, for a language model."""
    if batch_tokens < data.length:
        raise UserError(
            f"batch.tokens is {batch_tokens}, less than one row of {data.length} (data.length); set it to that or more"
        )
    rule, rows = RULES[data.task](data), batch_tokens // data.length
    # symbols are letters, so that models can be let write; more than 26 go on with other scripts' letters
    letters = [chr(ord("a") + n if n < 26 else 0x100 + n) for n in range(rule.symbols)]
    made = json.dumps(data.model_dump(exclude={"valid", "context"}), sort_keys=True)
    held = {name: _held(rule, data, rows, number) for number, name in enumerate(("valid", "test"))}
    tokenizer = CharTokenizer(letters)
    return OpenedData(
        task="language-model",
        tokenizers=TokenizerPair(tokenizer, tokenizer),
        train=Sampler(RulePlan(rule, rows, data.parts, made), seed),
        valid=held["valid"],
        test=held["test"],
        lines=tuple(_lines(data, rule)),
        spans=(LengthLimit(data.length, "a row (data.length)", "set data.length to that or less"),),
        cache=cache,
    )


def _held(rule: SyntheticRule, data: SyntheticData, rows: int, number: int) -> HeldOutBatches:
    """The same rows for every run; `number` tells validation from test data."""
    sequences = max(1, round(data.valid / (rows * rule.length)))
    shape = SyntheticShape(sequences * data.parts, rows, rule.length - int(data.context * rule.length), data.parts)
    batches = shape.batches
    epoch = RuleEpoch(rule, shape, (FIXED, data.seed, number))
    targets = sum(int((epoch.batch(one).targets != IGNORE_INDEX).sum()) for one in range(batches))
    # a symbol is a letter: as many characters and bytes as targets
    return HeldOutBatches(epoch, TextUnits(targets, targets, targets))


def _lines(data: SyntheticData, rule: SyntheticRule) -> list[str]:
    scored = f", the last {rule.length - int(data.context * rule.length)} scored" if data.context else ""
    parts = f", {data.parts} to a sequence" if data.parts > 1 else ""
    return [
        f"synthetic: {rule.describe()}",
        f"rows of {data.length} tokens{parts}, always new; held out: {human_amount(data.valid, 'tokens')}{scored}",
    ]
