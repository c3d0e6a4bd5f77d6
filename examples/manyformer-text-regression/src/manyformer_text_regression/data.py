"""The kind of data: a file with a text, a tab and a number in each line."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, final

import numpy as np
import torch

from manyformer.base.errors import UserError
from manyformer.config import DataSection
from manyformer.data import DataKind, OpenRequest, Sampler, register
from manyformer.data.batching.length_buckets import SequenceDataset, held_out_batches, training_buckets
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, path_name
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, train_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.core import PADDING_SEGMENT
from manyformer_text_regression.model import RegressionBatch

MAX_LENGTH = 512


class NumbersData(DataSection):
    """Texts with numbers, for regression."""

    kind: Literal["numbers"] = "numbers"
    """Texts with numbers."""
    path: str
    """A file with a text, a tab and a number in each line; every tenth line is held out."""

    @property
    def row_length(self) -> int:
        return MAX_LENGTH


class NumberedText(NamedTuple):
    """A text and its number."""

    text: str
    number: float


@final
class NumberedDataset(SequenceDataset):
    """Texts as BOS + x + EOS in memory, cut at `MAX_LENGTH`, with their numbers."""

    def __init__(self, texts: Sequence[NumberedText], tokenizer: Tokenizer) -> None:
        self._rows = [[tokenizer.bos, *tokenizer.encode(item.text)[: MAX_LENGTH - 2], tokenizer.eos] for item in texts]
        self._pad = tokenizer.pad
        self._numbers = torch.tensor([item.number for item in texts])
        self.lengths = self.tie_breakers = np.array([len(row) for row in self._rows])
        self.fingerprint = hashlib.sha256(repr(texts).encode()).hexdigest()[:12]

    def make_batch(self, indices: np.ndarray) -> RegressionBatch:
        rows = [torch.tensor(self._rows[index]) for index in indices]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._pad)
        lengths = torch.tensor([len(row) for row in rows])
        is_padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        segments = torch.zeros_like(tokens).masked_fill(is_padding, PADDING_SEGMENT)
        return RegressionBatch(tokens, self._numbers[indices], segments)


def read_numbers(path: str) -> list[NumberedText]:
    """The texts and numbers in a file. Raises UserError for a line that has no number."""
    texts = []
    for count, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text, _, number = line.rpartition("\t")
        try:
            texts.append(NumberedText(text, float(number)))
        except ValueError as error:
            raise UserError(f"{path}:{count}: a line is a text, a tab and a number, not {line!r}") from error
    if len(texts) < 2:
        raise UserError(f"{path} has {len(texts)} texts; training needs at least two")
    return texts


def open_numbers(section: NumbersData, form: str, request: OpenRequest) -> OpenedData:
    """Open texts with numbers; the vocabulary is the characters of the training texts."""
    texts = read_numbers(section.path)
    splits = {"train": [item for row, item in enumerate(texts) if row % 10], "valid": texts[::10]}
    tokenizer = train_tokenizer("char", (item.text for item in splits["train"]), None)
    datasets = {name: NumberedDataset(items, tokenizer) for name, items in splits.items()}
    buckets = training_buckets(datasets["train"], request.batch_tokens, noun="text", max_length=MAX_LENGTH)
    longest = max(int(dataset.lengths.max()) for dataset in datasets.values())
    return OpenedData(
        tokenizers=TokenizerPair(tokenizer, tokenizer),
        train=Sampler(buckets, request.seed),
        valid=held_out_batches(datasets["valid"], request.batch_tokens),
        test=None,
        summary_lines=(f"texts with numbers: {len(splits['train']):,}, held out {len(splits['valid']):,}",),
        length_limits=(LengthLimit(longest, "the longest text", "build a longer model"),),
        cache=request.cache,
        required_keywords={"vocab": tokenizer.vocab},
    )


def held_out_numbers(section: NumbersData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The held-out texts."""
    if split not in (None, "valid"):
        raise UserError(f"texts with numbers have no split '{split}', only valid")
    return EvaluationData("valid", open_numbers(section, form, request).valid)


def numbers_of_file(
    section: NumbersData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The texts and numbers of a file, for a trained model."""
    dataset = NumberedDataset(read_numbers(str(path)), tokenizers.source)
    return EvaluationData(path_name(path), held_out_batches(dataset, request.batch_tokens))


NUMBERS = register(
    DataKind(
        section=NumbersData,
        forms=("numbered",),
        open=open_numbers,
        held_out=held_out_numbers,
        from_file=numbers_of_file,
    )
)
