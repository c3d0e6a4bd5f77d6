"""Two texts in one row: start token, first text, end token, second text, end token (Devlin et al. 2019, section 3).

Tokenizers of other models may have more than one end token between the texts, such as RoBERTa's."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from manyformer.nn.core import GLOBAL_ROLE, PADDING_SEGMENT
from manyformer.nn.runtime.devices import send

MAX_QUESTION_SHARE = 4
"""A question takes at most one of so many tokens of a row, so that the document has room."""

_WORD = re.compile(r"\s*\w+|\s*[^\w\s]|\s+\Z")
SENTENCE_ENDS = ".!?"


class SpannedTokens(Protocol):
    """The token ids of a text; token i stands for the characters `starts[i]` to `stops[i]` - 1 of it."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def starts(self) -> NDArray[np.int32]: ...
    @property
    def stops(self) -> NDArray[np.int32]: ...


class FramingTokenizer(Protocol):
    """A tokenizer with the tokens of the frame."""

    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def pair_separators(self) -> int: ...
    def encode(self, text: str) -> Sequence[int]: ...


class DocumentTokenizer(FramingTokenizer, Protocol):
    """A tokenizer that also tells which characters of a text each token stands for."""

    def encode_spans(self, text: str) -> SpannedTokens: ...


class FramedTexts(NamedTuple):
    """The tokens of a row and the part of each: 0 for the first text with its frame; the second begins at `start`.

    `uncut_length` is the least limit with which nothing is cut. `spans` are the first character of each token of a
    document and the one after its last."""

    tokens: list[int]
    parts: list[int]
    start: int
    uncut_length: int
    spans: Sequence[tuple[int, int]] = ()


class TwoTextTensors(NamedTuple):
    """Rows padded on the right, with segments, and with parts, -1 for padding."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"]
    parts: Int[Tensor, "b l"]


def frame_pair(first: Sequence[int], second: Sequence[int], tokenizer: FramingTokenizer, limit: int) -> FramedTexts:
    """A row of two sentences, parts 0 and 1; the longer one loses its last tokens until the row has `limit` tokens."""
    first_length = len(first)
    second_length = len(second)
    # one token at a time, from the longer one
    while first_length + second_length > max(0, limit - _frame_length(tokenizer)):
        if first_length > second_length:
            first_length -= 1
        else:
            second_length -= 1
    uncut_length = len(first) + len(second) + _frame_length(tokenizer)
    return _frame(first[:first_length], second[:second_length], [1] * second_length, tokenizer, uncut_length)


class DocumentTokens(NamedTuple):
    """The tokens of a document, the characters of each (its first, and the one after its last), and its sentence."""

    ids: list[int]
    spans: list[tuple[int, int]]
    sentences: list[int]


def sentence_starts(document: str) -> list[int]:
    """Where the sentences of a document begin, with the white space before them.

    A sentence ends after . ! ? and at an empty line."""
    # the first sentence begins with the document, whatever that begins with
    starts = [0]
    last_character = ""
    for match in _WORD.finditer(document):
        ends_before = last_character in tuple(SENTENCE_ENDS) and match[0][:1].isspace()
        if match.start() and (ends_before or "\n\n" in match[0]):
            starts.append(match.start())
        last_character = match[0][-1]
    return starts


class DocumentEncoder:
    """Encodes documents as running text, each once while the questions about it follow each other."""

    def __init__(self, tokenizer: DocumentTokenizer) -> None:
        self.tokenizer = tokenizer
        self._encode = lru_cache(maxsize=16)(self._tokens)

    def __call__(self, document: str) -> DocumentTokens:
        return self._encode(document)

    def _tokens(self, document: str) -> DocumentTokens:
        tokens = self.tokenizer.encode_spans(document)
        starts = tokens.starts.tolist()
        sentences = sentence_starts(document)
        return DocumentTokens(
            tokens.ids.tolist(),
            list(zip(starts, tokens.stops.tolist())),
            [bisect_right(sentences, start) - 1 for start in starts],
        )


def tokens_of_answer(document: DocumentTokens, start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last token that share a character with the characters `start` to `stop` - 1, None without."""
    touched = [
        number for number, (begin, end) in enumerate(document.spans) if begin < end and begin < stop and start < end
    ]
    if touched:
        return (touched[0], touched[-1])
    return None


def answer_text(document: str, first: tuple[int, int], last: tuple[int, int]) -> str:
    """The characters of a document from one token to another, without white space around them."""
    stop = last[1]
    # tokenizers that remove accents leave combining ones out of their tokens
    while stop < len(document) and unicodedata.category(document[stop]) in ("Mn", "Me"):
        stop += 1
    return document[first[0] : stop].strip()


def frame_question(question: str, document: str, encode: DocumentEncoder, limit: int) -> FramedTexts:
    """A row of a question, part 0, and a document, whose sentences are the parts from 1; the row has `limit` tokens.

    A question is cut at a quarter of the row, the document at its end."""
    question_ids = list(encode.tokenizer.encode(question))
    tokens = encode(document)
    kept_ids = question_ids[: limit // MAX_QUESTION_SHARE]
    frame_length = _frame_length(encode.tokenizer)
    room = max(0, limit - frame_length - len(kept_ids))
    uncut_length = max(MAX_QUESTION_SHARE * len(question_ids), len(question_ids) + len(tokens.ids) + frame_length)
    # 0 is the part of the question
    parts = [sentence + 1 for sentence in tokens.sentences[:room]]
    framed = _frame(kept_ids, tokens.ids[:room], parts, encode.tokenizer, uncut_length)
    return framed._replace(spans=tokens.spans[:room])


def _frame_length(tokenizer: FramingTokenizer) -> int:
    """The number of tokens around two texts: the start token, those between the texts, and the end token."""
    return 2 + tokenizer.pair_separators


def _frame(
    first: Sequence[int],
    second: Sequence[int],
    second_parts: list[int],
    tokenizer: FramingTokenizer,
    uncut_length: int,
) -> FramedTexts:
    separators = [tokenizer.eos] * tokenizer.pair_separators
    tokens = [tokenizer.bos, *first, *separators, *second, tokenizer.eos]
    start = 1 + len(first) + len(separators)
    return FramedTexts(tokens, [0] * start + second_parts + (second_parts[-1:] or [1]), start, uncut_length)


def pad_texts(rows: Iterable[FramedTexts], pad: int, device: torch.device) -> TwoTextTensors:
    """Rows of two texts as tensors."""
    framed = list(rows)
    width = max(len(row.tokens) for row in framed)

    def padded(values: Iterable[Sequence[int]], fill: int) -> Int[Tensor, "b l"]:
        on_host = torch.tensor([[*row, *[fill] * (width - len(row))] for row in values])
        return send(on_host, device)

    segments = padded(([0] * len(row.tokens) for row in framed), PADDING_SEGMENT)
    return TwoTextTensors(
        padded((row.tokens for row in framed), pad), segments, padded((row.parts for row in framed), -1)
    )


def first_text_roles(parts: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """The global role for the tokens of the first text and of the frame before it and after it."""
    return GLOBAL_ROLE * (parts == 0).long()


def halves(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b l"]:
    """Parts of drawn tokens: 0 for the first token of each document, 1 for the others; -1 for padding."""
    if segments is None:
        # without segments each row is one document
        segments = torch.zeros_like(tokens)
    previous = torch.cat([torch.full_like(segments[:, :1], PADDING_SEGMENT), segments[:, :-1]], 1)
    return torch.where(segments == PADDING_SEGMENT, -1, (segments == previous).long())
