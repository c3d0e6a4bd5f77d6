"""Batches of token rows: CPU tensors, one sequence per row."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from jaxtyping import Int64, Shaped
from torch import Tensor

from manyformer.batches.batch import SegmentLayout, count_scored, count_valid, ignore_all, scored_places

NO_NEIGHBOUR = -1
"""Stands for a retrieved token where there are fewer than there could be."""


class CausalLMBatch(NamedTuple):
    """A language model's rows: `targets[:, i]` is the token that follows `tokens[:, i]`, or `IGNORE_INDEX`."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    # Equal ids are one document, -1 is padding; None: every row is one document without padding.
    segments: Int64[Tensor, "b l"] | None = None
    # The k tokens retrieved for each token (those that followed similar contexts), `NO_NEIGHBOUR` for none; None: no
    # retrieval.
    neighbours: Int64[Tensor, "b l k"] | None = None
    # The position of each token in its text, -1 for padding; None unless the text is held out.
    text_positions: Int64[Tensor, "b l"] | None = None
    # Where the documents of `segments` are; None where nobody has read it.
    layout: SegmentLayout = None

    def in_pieces(self, length: int) -> "Iterator[CausalLMBatch]":
        """The batch in pieces of at most `length` columns, from left to right."""
        for start in range(0, self.tokens.shape[1], length):
            columns = slice(start, start + length)
            yield CausalLMBatch(
                self.tokens[:, columns],
                self.targets[:, columns],
                None if self.segments is None else self.segments[:, columns],
                None if self.neighbours is None else self.neighbours[:, columns],
                None if self.text_positions is None else self.text_positions[:, columns],
            )

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class Seq2SeqBatch(NamedTuple):
    """Pairs of a source and a sequence y: `target` is BOS + y, `targets` is y + EOS, `IGNORE_INDEX` at padding.

    A source is what the model's encoder reads: tokens (b, s), images (b, h, w, c), frames (b, f, m). The layouts say
    where the documents of both are, None where nobody has read it; so does `layout` of the batches below."""

    source: Shaped[Tensor, "b *source"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    source_segments: Int64[Tensor, "b s"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None
    source_layout: SegmentLayout = None
    target_layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class MaskedLMBatch(NamedTuple):
    """A masked language model's rows: `tokens` are corrupted, `targets` the originals of selected tokens.

    Targets of all other tokens are `IGNORE_INDEX`. `roles` are 1 for global tokens and 0 otherwise; `parts` number the
    parts (such as sentences) of each document from 0, -1 for none. Both are optional inputs of a model. `mask` is the
    id of the mask token, once for each row, for losses that hide more tokens than the batch does.
    """

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None
    mask: Int64[Tensor, " b"] | None = None
    # Among all tokens, those with a target and perhaps some others; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))

    def with_places(self) -> Self:
        return self._replace(scored=scored_places(self.targets))


class ClassificationBatch(NamedTuple):
    """A text classifier's rows, with one class index per row; `roles` and `parts` are as of `MaskedLMBatch`."""

    tokens: Int64[Tensor, "b l"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels))


class AnswerSpanBatch(NamedTuple):
    """Rows of a question and a document; `targets` are the columns of the first and the last token of the answer.

    The column of the row's first token stands for no answer. `roles` are 1 for global tokens and 0 otherwise, `parts`
    number the sentences, of which the question is the first."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b 2"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class TaggingBatch(NamedTuple):
    """A tagger's rows: the class of each word is the target of its first token, `IGNORE_INDEX` elsewhere.

    `trees` holds depth, preorder number and last descendant's preorder number of each token's node
    (`manyformer.structures`), -1 for tokens in no tree."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    trees: Int64[Tensor, "b l 3"] | None = None
    # Among all tokens, those with a target and perhaps some others; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))

    def with_places(self) -> Self:
        return self._replace(scored=scored_places(self.targets))
