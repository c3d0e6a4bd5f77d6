"""Opening synthetic sequences for language models and classifiers: a rule generates every batch from seeds."""

from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.base.type_aliases import IntArray
from manyformer.config import SyntheticData
from manyformer.data.batching.epochs import FIXED_SEED, Epoch, EpochPlan, HeldOutBatches, Sampler, random_generator
from manyformer.data.generated.synthetic import SyntheticRows, SyntheticRule, make_rule
from manyformer.data.pipeline.kind import HELD_OUT_SPLITS, DataKind, OpenRequest, register
from manyformer.data.pipeline.opened import (
    EvaluationData,
    EvaluationPath,
    HeldOutExample,
    OpenedData,
    check_holds_row,
    format_amount,
    path_name,
    row_limit,
)
from manyformer.data.tokenizers.native_tokenizers import CharTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import SPECIALS, NativeTokenizer
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, ClassificationBatch, TextUnits
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.runtime.exact_shares import floor_share

LABELLED = "labelled"
"""The form of a classifier: each row has one label, its last answer."""
PROMPT_SYMBOLS = 10
"""Length of the prompt of a sample."""
BATCHES_PER_EPOCH = 1000
"""The batches of an epoch, all of them new; a nominal unit, since generated data has no passes."""


class SyntheticShape(NamedTuple):
    """The sizes of an epoch: the number of batches, and of rows in each.

    Sequences are cut into `rows_per_sequence` rows, which follow each other in as many batches; the last
    `scored_targets` targets of each sequence count.
    """

    batches: int
    rows: int
    scored_targets: int
    rows_per_sequence: int = 1


@final
class RuleEpoch(Epoch):
    """Batches that are determined by `seeds` and their number; `first_sequence` offsets the segment ids."""

    def __init__(
        self,
        rule: SyntheticRule[Any],
        form: str,
        shape: SyntheticShape,
        seeds: tuple[int, ...],
        first_sequence: int = 0,
    ) -> None:
        self._rule = rule
        self._form = form
        self._shape = shape
        self._seeds = seeds
        self._first_sequence = first_sequence
        self.rows_continue = shape.rows_per_sequence > 1

    def __len__(self) -> int:
        return self._shape.batches

    def batch(self, number: int) -> CausalLMBatch | ClassificationBatch:
        # generated anew for each part of the sequence: a batch depends on nothing that was read before it
        sequence, part = divmod(number, self._shape.rows_per_sequence)
        rows = self._rule.rows(random_generator(*self._seeds, sequence), self._shape.rows)
        if self._form == LABELLED:
            return labelled_batch(rows)
        return self._next_token_batch(rows, sequence, part)

    def _next_token_batch(self, rows: SyntheticRows, sequence: int, part: int) -> CausalLMBatch:
        # symbols begin behind the special tokens
        targets = np.where(rows.targets < 0, IGNORE_INDEX, rows.targets + len(SPECIALS))
        targets[:, : self._rule.length - self._shape.scored_targets] = IGNORE_INDEX
        length = self._rule.length // self._shape.rows_per_sequence
        columns = slice(part * length, (part + 1) * length)
        padding = rows.symbols < 0
        tokens = np.where(padding, NativeTokenizer.pad, rows.symbols + len(SPECIALS))
        # continuing rows need ascending ids: a new sequence is a new document
        segments = np.where(padding, PADDING_SEGMENT, self._first_sequence + sequence if self.rows_continue else 0)
        has_segments = self.rows_continue or bool(padding.any())
        arrays = (tokens, targets, segments) if has_segments else (tokens, targets)
        batch_tokens, batch_targets, *rest = (torch.from_numpy(array[:, columns].copy()) for array in arrays)
        return CausalLMBatch(batch_tokens, batch_targets, segments=rest[0] if rest else None)


def labelled_batch(rows: SyntheticRows) -> ClassificationBatch:
    """The rows as BOS + symbols + EOS for a classifier; the label is the last target that is scored."""
    # rows of a classifier are as long as the longest, not as `data.length`
    lengths = (rows.symbols >= 0).sum(axis=1, keepdims=True)
    width = int(lengths.max()) + 2
    tokens = np.full((len(rows.symbols), width), NativeTokenizer.pad)
    tokens[:, 1:-1] = np.where(rows.symbols < 0, NativeTokenizer.pad, rows.symbols + len(SPECIALS))[:, : width - 2]
    tokens[:, 0] = NativeTokenizer.bos
    np.put_along_axis(tokens, lengths + 1, NativeTokenizer.eos, axis=1)
    padding = np.arange(width) > lengths + 1
    segments = None
    if padding.any():
        segments = torch.from_numpy(-padding.astype(np.int64))
    return ClassificationBatch(torch.from_numpy(tokens), torch.from_numpy(_labels(rows)), segments)


def _labels(rows: SyntheticRows) -> IntArray:
    """The last target of each row that is scored."""
    # the first scored target from the end
    last = rows.targets.shape[1] - 1 - (rows.targets >= 0)[:, ::-1].argmax(axis=1, keepdims=True)
    return np.take_along_axis(rows.targets, last, axis=1)[:, 0]


@final
class RulePlan(EpochPlan):
    """An endless plan of epochs with newly generated rows."""

    def __init__(self, rule: SyntheticRule[Any], form: str, shape: SyntheticShape, fingerprint: str) -> None:
        self._rule = rule
        self._form = form
        self._shape = shape
        self.fingerprint = f"{fingerprint}-{shape.rows}"

    def epoch(self, seed: int, number: int) -> RuleEpoch:
        # segment ids go on where those of the previous epoch ended
        return RuleEpoch(self._rule, self._form, self._shape, (seed, number), number * BATCHES_PER_EPOCH)


def open_synthetic(data: SyntheticData, form: str, request: OpenRequest) -> OpenedData:
    """Open sequences of the rule `data.rule` for a language model, or for a classifier of their last answers."""
    row_length = data.row_length if form == LABELLED else data.length
    check_holds_row(row_length, request.batch_tokens)
    _check_classes(data, form)
    rule = make_rule(data)
    rows = request.batch_tokens // row_length
    parts = data.rows_per_sequence
    # runs from before there was a choice of targets go on
    unused = {"targets"} if data.targets == "rule" else set()
    fingerprint = json_text(data.model_dump(exclude={"valid", "context"} | unused), sort_keys=True, ensure_ascii=True)
    shape = SyntheticShape(max(1, BATCHES_PER_EPOCH // parts) * parts, rows, rule.length, parts)
    held_out = {name: _held_out(rule, form, data, rows, number) for number, name in enumerate(HELD_OUT_SPLITS)}
    tokenizers = _tokenizers(data, form)
    if form == LABELLED:
        classes = {"classes": data.classes}
    else:
        classes = {}
    return OpenedData(
        tokenizers=tokenizers,
        train=Sampler(RulePlan(rule, form, shape, fingerprint), request.seed),
        valid=held_out["valid"],
        test=held_out["test"],
        summary_lines=tuple(_summary_lines(data, rule)),
        length_limits=(row_limit(row_length),),
        cache=request.cache,
        required_keywords={"vocab": tokenizers.source.vocab, **classes},
    )


def _check_classes(data: SyntheticData, form: str) -> None:
    """Raise UserError if a classifier cannot learn from the rule."""
    if form != LABELLED:
        return
    if data.classes is None:
        raise UserError(
            f"data.rule={data.rule} has no answer at the end of a row that a classifier could learn; listops, "
            "pathfinder and state-tracking have"
        )
    if data.targets != "rule":
        raise UserError(f"data.targets={data.targets} is for language models: a classifier learns the answer of a row")
    if data.rows_per_sequence > 1 or data.context:
        setting = "data.context"
        if data.rows_per_sequence > 1:
            setting = "data.rows_per_sequence"
        raise UserError(f"{setting} is for language models: a classifier reads each row as a whole")


def _tokenizers(data: SyntheticData, form: str) -> TokenizerPair:
    # symbols are letters, so that generated text is readable; beyond 26 they continue with code points from 0x100
    letters = [chr(ord("a") + n if n < 26 else 0x100 + n) for n in range(data.alphabet)]
    tokenizer = CharTokenizer(letters)
    labels = None
    if form == LABELLED:
        labels = tuple(map(str, range(data.classes or 0)))
    return TokenizerPair(tokenizer, tokenizer, labels)


def held_out_sequences(data: SyntheticData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The generated sequences of a held-out split, by default test."""
    opened = open_synthetic(data, form, request)
    name = split or "test"
    batches = opened.valid if name == "valid" else opened.test
    assert batches is not None
    return EvaluationData(name, batches, tuple(_examples(opened, batches)) if form == LABELLED else ())


def _examples(opened: OpenedData, batches: HeldOutBatches) -> Iterator[HeldOutExample]:
    """The rows of a classifier as texts, each with its label."""
    assert opened.labels is not None
    for number, batch in enumerate(batches):
        for row, (tokens, label) in enumerate(zip(batch[0].tolist(), batch[1].tolist(), strict=True)):
            text = opened.source.decode([token for token in tokens if token >= len(SPECIALS)])
            yield HeldOutExample(text, opened.labels[label], f"batch {number}, row {row}")


def refuse_file(
    data: SyntheticData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """Raise UserError, since there are no files of generated data."""
    raise UserError(
        f"{path_name(path)}: this run was trained on generated data, not on files; score its split valid or test"
    )


def sample_prompt(data: SyntheticData, request: OpenRequest) -> str:
    """The first symbols of the held-out sequences."""
    opened = open_synthetic(data, "next-token", request)
    return opened.source.decode(next(iter(opened.valid))[0][0, :PROMPT_SYMBOLS])


def _held_out(rule: SyntheticRule[Any], form: str, data: SyntheticData, rows: int, number: int) -> HeldOutBatches:
    """Held-out rows, the same for every run; `number` distinguishes validation from test data."""
    sequences = max(1, round(data.valid / (rows * rule.length)))
    shape = SyntheticShape(
        sequences * data.rows_per_sequence,
        rows,
        rule.length - floor_share(data.context, rule.length),
        data.rows_per_sequence,
    )
    batches = shape.batches
    epoch = RuleEpoch(rule, form, shape, (FIXED_SEED, data.seed, number))
    if form == LABELLED:
        return HeldOutBatches(epoch, None)
    targets = sum(epoch.batch(batch).target_count() for batch in range(batches))
    # a symbol is a letter, so the targets count as characters and bytes
    return HeldOutBatches(epoch, TextUnits(targets, targets, targets))


def _summary_lines(data: SyntheticData, rule: SyntheticRule[Any]) -> list[str]:
    scored = ""
    if data.context:
        scored = f", the last {rule.length - floor_share(data.context, rule.length)} scored"
    parts = ""
    if data.rows_per_sequence > 1:
        parts = f", {data.rows_per_sequence} to a sequence"
    return [
        f"synthetic: {rule.describe()}",
        f"rows of {data.length} tokens{parts}, always new; held out: {format_amount(data.valid, 'tokens')}{scored}",
    ]


SYNTHETIC = register(
    DataKind(
        section=SyntheticData,
        forms=("next-token", LABELLED),
        open=open_synthetic,
        held_out=held_out_sequences,
        from_file=refuse_file,
        sample_prompt=sample_prompt,
        cache_is_shared=True,
    )
)
