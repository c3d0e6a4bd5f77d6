"""Two texts in one row: start token, first text, end token, second text, end token (Devlin et al. 2019, section 3).

Tokenizers of other models may have more than one end token between the texts, such as RoBERTa's."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import GLOBAL_ROLE, PADDING_SEGMENT

MAX_QUESTION_SHARE = 4
"""A question takes at most one of so many tokens of a row, so that the document has room."""

_WORD = re.compile(r"\s*\w+|\s*[^\w\s]|\s+\Z")
SENTENCE_ENDS = ".!?"


class FramingTokenizer(Protocol):
    """A tokenizer with the tokens of the frame."""

    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def pair_separators(self) -> int: ...
    def encode(self, text: str) -> Sequence[int]: ...


class FramedTexts(NamedTuple):
    """The tokens of a row and the part of each: 0 for the first text with its frame; the second begins at `start`.

    `uncut_length` is the least limit with which nothing is cut."""

    tokens: list[int]
    parts: list[int]
    start: int
    uncut_length: int


class TwoTextTensors(NamedTuple):
    """Rows padded on the right, with segments, and with parts, -1 for padding."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"]
    parts: Int[Tensor, "b l"]


def frame_pair(first: Sequence[int], second: Sequence[int], tokenizer: FramingTokenizer, limit: int) -> FramedTexts:
    """A row of two sentences, parts 0 and 1; the longer one loses its last tokens until the row has `limit` tokens."""
    first_length, second_length = len(first), len(second)
    while first_length + second_length > max(0, limit - _frame_length(tokenizer)):
        if first_length > second_length:
            first_length -= 1
        else:
            second_length -= 1
    uncut_length = len(first) + len(second) + _frame_length(tokenizer)
    return _frame(first[:first_length], second[:second_length], [1] * second_length, tokenizer, uncut_length)


class DocumentWords(NamedTuple):
    """A document as words with the white space before them, the start of each in the text, and its sentence from 0."""

    words: list[str]
    starts: list[int]
    sentences: list[int]


# questions about one document follow each other
@lru_cache(maxsize=16)
def split_document(document: str) -> DocumentWords:
    """Split a document into words, which tokens do not cross; a sentence ends after . ! ? and at an empty line."""
    split, sentence = DocumentWords([], [], []), 0
    for match in _WORD.finditer(document):
        ends_before = bool(split.words) and split.words[-1][-1] in SENTENCE_ENDS and match[0][:1].isspace()
        sentence += bool(split.words) and (ends_before or "\n\n" in match[0])
        split.words.append(match[0])
        split.starts.append(match.start())
        split.sentences.append(sentence)
    return split


def words_of_answer(words: DocumentWords, start: int, stop: int) -> tuple[int, int]:
    """The first and the last word that share a character with the characters `start` to `stop` - 1 of a document."""
    ends = [begin + len(word) for begin, word in zip(words.starts, words.words)]
    touched = [number for number, (begin, end) in enumerate(zip(words.starts, ends)) if begin < stop and start < end]
    return touched[0], touched[-1]


class WordEncoder:
    """Encodes single words with a tokenizer, each once."""

    def __init__(self, tokenizer: FramingTokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, word: str) -> list[int]:
        if word not in self._ids:
            self._ids[word] = list(self.tokenizer.encode(word))
        return self._ids[word]


def frame_question(question: str, words: DocumentWords, encode: WordEncoder, limit: int) -> FramedTexts:
    """A row of a question, part 0, and a document, whose sentences are the parts from 1; the row has `limit` tokens.

    A question is cut at a quarter of the row, the document at its end."""
    question_ids = [token for word in split_document(question).words for token in encode(word)]
    kept_ids = question_ids[: limit // MAX_QUESTION_SHARE]
    document_ids = [token for word in words.words for token in encode(word)]
    parts = [sentence + 1 for word, sentence in zip(words.words, words.sentences) for _ in encode(word)]
    frame_length = _frame_length(encode.tokenizer)
    room = max(0, limit - frame_length - len(kept_ids))
    uncut_length = max(MAX_QUESTION_SHARE * len(question_ids), len(question_ids) + len(document_ids) + frame_length)
    return _frame(kept_ids, document_ids[:room], parts[:room], encode.tokenizer, uncut_length)


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
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], device=device)

    segments = padded(([0] * len(row.tokens) for row in framed), PADDING_SEGMENT)
    return TwoTextTensors(
        padded((row.tokens for row in framed), pad), segments, padded((row.parts for row in framed), -1)
    )


def first_text_roles(parts: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """The global role for the tokens of the first text and of the frame before it and after it."""
    return GLOBAL_ROLE * (parts == 0).long()


def halves(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b l"]:
    """Parts of drawn tokens: 0 for the first token of each document, 1 for the others; -1 for padding."""
    segments = torch.zeros_like(tokens) if segments is None else segments
    previous = torch.cat([torch.full_like(segments[:, :1], PADDING_SEGMENT), segments[:, :-1]], 1)
    return torch.where(segments == PADDING_SEGMENT, -1, (segments == previous).long())
