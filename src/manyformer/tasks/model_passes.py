"""Passes of a model over a text or an image, for display, with the labels of their tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyformer.core import WatchFn
from manyformer.tasks.tokenizer_protocols import TextTokenizer


class EncodedText(NamedTuple):
    """The token ids of a text without special tokens, the tokenizer, and a function that labels tokens for display.

    `answer` is the text that a model of a task with a source writes.
    """

    ids: list[int]
    tokenizer: TextTokenizer
    labels_of: Callable[[Sequence[int]], tuple[str, ...]]
    answer: "EncodedText | None" = None


class TextPass(NamedTuple):
    """One pass of a model over the tokens of a text, which reports what it computes to a `watch` callback.

    `labels` are those of its tokens. Reported tensors have `length` columns of tokens, of which those beyond the labels
    are padding. A pass that attends to a source has the labels of the source, and those of the tokens that are
    predicted at each step. `tokens` and `source_tokens` are the ids, without padding.
    `remembered_labels` are those of the tokens before, which the model may have in its memory.
    """

    run: Callable[[WatchFn], object]
    labels: tuple[str, ...]
    length: int
    predicted_labels: tuple[str, ...] = ()
    source_labels: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    source_tokens: tuple[int, ...] = ()
    remembered_labels: tuple[str, ...] = ()


class ImagePass(NamedTuple):
    """One pass of a model over an image: `corners` has the row and column of the upper left pixel of each token.

    A token covers `size` x `size` pixels; the corner of one that covers none, such as a class token, is None.
    """

    tokens: TextPass
    corners: tuple[tuple[int, int] | None, ...]
    size: int
