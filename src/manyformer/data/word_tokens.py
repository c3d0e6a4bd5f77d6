"""The tokens of the words of a sentence, each of which has something of its own, such as a label."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from manyformer.data.tokenizer import Tokenizer
from manyformer.type_aliases import IntArray

NO_WORD = -1


class WordsInText(NamedTuple):
    """Words as they stand in a running text: word i is `text[starts[i] : stops[i]]`."""

    text: str
    starts: list[int]
    stops: list[int]

    @classmethod
    def of_forms(cls, forms: Sequence[str], has_space_after: Sequence[bool]) -> "WordsInText":
        """The words one behind the other, with a space behind those that have one."""
        pieces = []
        starts = []
        stops = []
        length = 0
        for form, has_space in zip(forms, has_space_after, strict=True):
            starts.append(length)
            stops.append(length + len(form))
            pieces.append(form + " " * has_space)
            length += len(pieces[-1])
        return cls("".join(pieces).rstrip(" "), starts, stops)


class WordTokens(NamedTuple):
    """Tokens with the number of the word of each, `NO_WORD` for one behind all words; the first token of every word.

    `is_divided` says that the text was encoded in pieces, since the tokenizer joins words in a token."""

    ids: IntArray
    word_numbers: IntArray
    first: IntArray
    is_divided: bool = False


def tokens_of_words(forms: Sequence[str], tokenizer: Tokenizer) -> WordTokens:
    """The tokens of words that are encoded one by one, for a tokenizer that was learned from words."""
    ids = tokenizer.encode_many(forms)
    return _with_unknown_words(
        np.concatenate(ids), np.repeat(np.arange(len(forms)), list(map(len, ids))), len(forms), tokenizer
    )


def tokens_in_text(sentence: WordsInText, tokenizer: Tokenizer) -> WordTokens:
    """The tokens of words in their running text, as the tokenizer encodes it where no token belongs to two words.

    Where one does, the text is encoded in pieces that end between the two."""
    borders = [0, len(sentence.text)]
    while True:
        pieces = [_encode_piece(sentence, start, stop, tokenizer) for start, stop in pairwise(borders)]
        ids = np.concatenate([piece[0] for piece in pieces])
        first_words = np.concatenate([piece[1] for piece in pieces])
        last_words = np.concatenate([piece[2] for piece in pieces])
        joined = first_words != last_words
        if not joined.any():
            return _with_unknown_words(ids, first_words, len(sentence.starts), tokenizer, is_divided=len(borders) > 2)
        crossed = {
            sentence.stops[word] for a, b in zip(first_words[joined], last_words[joined]) for word in range(a, b)
        }
        borders = sorted({*borders, *crossed})


def _encode_piece(
    sentence: WordsInText, start: int, stop: int, tokenizer: Tokenizer
) -> tuple[IntArray, IntArray, IntArray]:
    """The tokens of a part of the text, with the first and the last word that each has a character of."""
    tokens = tokenizer.encode_spans(sentence.text[start:stop])
    first = []
    last = []
    for begin, end in zip((tokens.starts + start).tolist(), (tokens.stops + start).tolist()):
        low = bisect_right(sentence.stops, begin)
        high = bisect_left(sentence.starts, end) - 1
        is_within = begin < end and low <= high
        first.append(low if is_within else NO_WORD)
        last.append(high if is_within else NO_WORD)
    return tokens.ids.astype(np.int64), np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def _with_unknown_words(
    ids: IntArray, word_numbers: IntArray, count: int, tokenizer: Tokenizer, *, is_divided: bool = False
) -> WordTokens:
    """The tokens with an unknown one for each word without any (some tokenizers drop characters)."""
    missing = np.setdiff1d(np.arange(count), word_numbers)
    # a word belongs behind the tokens of the words before it, and behind spaces that precede those
    if len(word_numbers):
        reached = np.maximum.accumulate(word_numbers)
    else:
        reached = word_numbers
    places = np.searchsorted(reached, missing, side="right")
    ids = np.insert(ids, places, tokenizer.unk)
    word_numbers = np.insert(word_numbers, places, missing)
    # a space belongs to the word behind it, as in tokens that have both
    following = np.where(word_numbers == NO_WORD, count, word_numbers)[::-1]
    word_numbers = np.minimum.accumulate(following)[::-1]
    word_numbers = np.where(word_numbers == count, NO_WORD, word_numbers)
    numbers, first = np.unique(word_numbers, return_index=True)
    return WordTokens(ids, word_numbers, first[numbers != NO_WORD], is_divided)
