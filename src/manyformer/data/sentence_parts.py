"""The sentences of tokenized text as the parts of its documents."""

import numpy as np
from numpy.typing import NDArray

from manyformer.core import PADDING_SEGMENT
from manyformer.data.tokenizer import Tokenizer
from manyformer.two_texts import SENTENCE_ENDS
from manyformer.type_aliases import IntArray


def tokens_that_end_sentences(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """For each token whether a sentence ends with it: it ends with . ! or ? and white space, or has a blank line."""
    texts = [tokenizer.token(token) for token in range(tokenizer.vocab)]
    return np.array(["\n\n" in text or text.rstrip()[-1:] in tuple(SENTENCE_ENDS) for text in texts])


def number_sentences(tokens: IntArray, segments: IntArray | None, ends: NDArray[np.bool_]) -> IntArray:
    """The number of each token's sentence, from 0 in each document; -1 for padding. `ends` is that of all tokens."""
    segments = np.zeros_like(tokens) if segments is None else segments
    ended = np.zeros_like(tokens)
    ended[:, 1:] = ends[tokens[:, :-1]]
    starts = np.ones(tokens.shape, dtype=bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    counts = np.cumsum(ended, axis=1)
    numbers = counts - np.maximum.accumulate(np.where(starts, counts, 0), axis=1)
    return np.where(segments == PADDING_SEGMENT, -1, numbers)
