"""Tokens as a model is given them: checks of rows and ids, positions in their documents, and their embedding.

`SourceEmbedding` is the interface for everything an encoder reads, of which tokens are one kind.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.batches.batch import SegmentLayout, segment_layout
from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    State,
    TokenPositions,
    contiguous_positions,
)
from manyformer.nn.positions.absolute import SentenceTypePosition
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.dropout import Dropout

UNSTARTED_SEGMENT = -2
"""The segment id of a row without tokens so far."""


class StreamTail(NamedTuple):
    """The position and segment of each row's last token that is not padding, from which the next call continues.

    As long as all rows are one document without padding, `contiguous_length` is their number of tokens and the tensors
    are not used. `columns` counts all columns so far, and `aligned` states that no row has padding between tokens of
    one document.
    """

    position_ids: Int[Tensor, " b"]
    segment_ids: Int[Tensor, " b"]
    contiguous_length: int | None = 0
    columns: int = 0
    aligned: bool = True


class ModelState(NamedTuple):
    """The state of a model between calls: that of its layers and the last position of each row."""

    body: State
    tail: StreamTail


def check_token_rows(tokens: Tensor) -> None:
    """Raise UserError unless tokens are whole numbers in rows."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise UserError(
            f"tokens must be whole numbers of shape (batch, length), and these are {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )


def check_length(length: int, max_length: int | None) -> None:
    """Raise ValueError for a sequence of more than `max_length` tokens; None is no limit."""
    if max_length is not None and length > max_length:
        raise ValueError(f"{length} tokens are more than this model allows: it was built with max_length={max_length}")


def check_token_range(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for a token that is none of `vocab`; other devices than a CPU would have to wait for the answer.

    A compiled model does not check either.
    """
    if not is_readable(tokens) or not tokens.numel():
        return
    # NumPy reduces few numbers several times faster than torch
    ids = tokens.numpy()
    if ids.min() < 0 or ids.max() >= vocab:
        raise_token_error(tokens, vocab)


def raise_token_error(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for the first token that is none of `vocab`, if there is one."""
    for row, column in ((tokens < 0) | (tokens >= vocab)).nonzero()[:1].tolist():
        raise UserError(
            f"token {int(tokens[row, column])} in row {row}, column {column}: this model was built with vocab={vocab}, "
            f"so tokens must be 0 to {vocab - 1}"
        )


def empty_tail(batch: int, device: torch.device) -> StreamTail:
    """The tail before any token."""
    position_ids = torch.full((batch,), -1, device=device)
    return StreamTail(position_ids, torch.full_like(position_ids, UNSTARTED_SEGMENT), 0)


def positions_of(
    tokens: Int[Tensor, "b l"],
    segments: Int[Tensor, "b l"] | None,
    tail: StreamTail | None,
    layout: SegmentLayout = None,
) -> tuple[TokenPositions, StreamTail | None]:
    """The positions of `tokens`, and the tail after them if one was given.

    Without `segments` the tokens continue the document of their row. `layout` is what a batch knows of the segments;
    without it they are read where that is free. Raises ValueError if shapes disagree.
    """
    check_token_rows(tokens)
    batch, length = tokens.shape
    if segments is not None and segments.shape != tokens.shape:
        raise ValueError(f"segments {tuple(segments.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
    contiguous_length = 0 if tail is None else tail.contiguous_length
    # a layout counts from the first column of a stream
    if segments is not None and contiguous_length == 0:
        layout = segment_layout(segments, layout)
    else:
        layout = None
    if contiguous_length is not None and (segments is None or isinstance(layout, ContiguousLayout)):
        end = contiguous_length + length
        positions = contiguous_positions(batch, contiguous_length, end, tokens.device)
        if tail is None:
            return positions, None
        # the compiler of torch 2.11 cannot keep tuples that `_replace` has made, here and below
        return positions, StreamTail(tail.position_ids, tail.segment_ids, end, end, tail.aligned)
    start_tail = materialize_tail(empty_tail(batch, tokens.device) if tail is None else tail)
    if segments is None:
        current = torch.where(start_tail.segment_ids == UNSTARTED_SEGMENT, 0, start_tail.segment_ids)
        segments = current[:, None].expand(batch, length)
        # the tokens continue their documents, of which none becomes another one
        aligned = start_tail.aligned
    else:
        aligned = _is_aligned(segments, start_tail)
    position_ids, last = _count_positions(segments, start_tail)
    if tail is None:
        return TokenPositions(position_ids, segments, layout), None
    end_tail = StreamTail(last.position_ids, last.segment_ids, last.contiguous_length, last.columns, aligned)
    if layout is None and aligned:
        return TokenPositions(position_ids, segments, AlignedLayout(start_tail.columns)), end_tail
    return TokenPositions(position_ids, segments, layout), end_tail


def materialize_tail(tail: StreamTail) -> StreamTail:
    """The tail with valid tensors in place of `contiguous_length`."""
    if tail.contiguous_length is None:
        return tail
    if tail.contiguous_length == 0:
        return empty_tail(tail.position_ids.shape[0], tail.position_ids.device)._replace(contiguous_length=None)
    return StreamTail(
        torch.full_like(tail.position_ids, tail.contiguous_length - 1),
        torch.zeros_like(tail.segment_ids),
        None,
        tail.contiguous_length,
    )


def _count_positions(segment_ids: Int[Tensor, "b l"], start_tail: StreamTail) -> tuple[Int[Tensor, "b l"], StreamTail]:
    """Positions as the number of tokens since the last change of segment, not counting padding; and the next tail."""
    valid = segment_ids != PADDING_SEGMENT
    column = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    # the column of the last token so far, up to and with each column, -1 for none
    last = torch.where(valid, column, -1).cummax(1).values
    # the same before each column, so that padding between tokens separates nothing
    earlier = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1)
    previous = torch.where(earlier < 0, start_tail.segment_ids[:, None], segment_ids.gather(1, earlier.clamp(min=0)))
    starts = valid & (segment_ids != previous)
    count = valid.cumsum(1)
    # the number of tokens before the current document, -1 while it is the one of the tail
    base = torch.where(starts, count - 1, -1).cummax(1).values
    position_ids = torch.where(base < 0, start_tail.position_ids[:, None] + count, count - 1 - base)
    # a row without a token in this call keeps the place it had
    final = last[:, -1:]
    end_position = torch.where(final < 0, start_tail.position_ids[:, None], position_ids.gather(1, final.clamp(min=0)))
    end_segment = torch.where(final < 0, start_tail.segment_ids[:, None], segment_ids.gather(1, final.clamp(min=0)))
    columns = start_tail.columns + segment_ids.shape[1]
    # padding before the first token has no position; 0 avoids the invalid table index -1
    return position_ids.clamp(min=0), StreamTail(end_position[:, 0], end_segment[:, 0], None, columns)


def _is_aligned(segments: Int[Tensor, "b l"], start_tail: StreamTail) -> bool:
    """Whether the segment ids of each row ascend, without padding after tokens; False where they cannot be read.

    No document is then in several pieces, and none continues after padding, whose id is the lowest.
    """
    if not is_readable(segments) or not segments.numel():
        return False
    ids = segments.numpy()
    last = start_tail.segment_ids.numpy()
    if (ids[:, 1:] < ids[:, :-1]).any() or (ids[:, 0] < last).any():
        return False
    # padding may have split earlier documents, but not new ones
    return start_tail.aligned or bool((ids[:, 0] > last).all())


class EmbeddedSource(NamedTuple):
    """The vectors of a source and their positions, which may be fewer than the entries of the source."""

    x: Float[Tensor, "b l d"]
    positions: TokenPositions


class SourceEmbedding(nn.Module, ABC):
    """Reads token ids, images or frames of sound as a sequence of vectors with positions."""

    vocab: int | None = None
    """The number of token ids that it reads; None if it reads no tokens."""
    tokens: int | None = None
    """The number of vectors of every source; None if sources have different lengths."""

    @property
    def max_length(self) -> int | None:
        """The maximum length of a source; None for no limit, or if all sources have one size."""
        return None

    @abstractmethod
    def read_source(
        self,
        source: Shaped[Tensor, "b *source"],
        segments: Int[Tensor, "b s"] | None,
        layout: SegmentLayout = None,
    ) -> EmbeddedSource:
        """Embed a source whose entries are in these segments, -1 for padding; None for no padding.

        `layout` is what a batch knows of the segments, for sources whose entries are the tokens.
        Raises ValueError for a source that is too long or of another shape.
        """


@final
class TokenEmbedding(SourceEmbedding):
    """Scaled token vectors plus positions, an optional norm, and dropout (Vaswani et al. 2017, section 3.4).

    With `scale` sqrt(dim) and vectors drawn from N(0, 1/dim), as in the paper, token and position vectors have equal
    norms. Several `tables` are used in turn, the first for the token at position 1: for images whose channels follow
    one another after a start token, each channel then has a separate table (Parmar et al. 2018, section 3.1).
    `types` adds vectors of sentences.
    """

    vocab: int

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        position: Position | None = None,
        types: SentenceTypePosition | None = None,
        tables: int = 1,
        scale: float = 1.0,
        std: float | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.position = NoPosition() if position is None else position
        self.types = types
        self.vocab = vocab
        self.tables = tables
        self.scale = scale
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.token = nn.Embedding(tables * vocab, dim)
        nn.init.normal_(self.token.weight, std=1 / math.sqrt(dim) if std is None else std)

    def forward(self, tokens: Shaped[Tensor, "b l *d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        """The vectors of tokens at their positions; vectors (b, l, d) in place of ids are those of the tokens alone."""
        x = tokens if tokens.dtype.is_floating_point else self._look_up(tokens, positions)
        if self.scale != 1.0:
            x = x * self.scale
        x = self.position.embed(x, positions)
        if self.types is not None:
            x = self.types.embed(x, positions)
        x = x if self.norm is None else self.norm(x)
        # one token takes little more time than the call of a module
        dropped: Tensor = self.dropout(x) if self.training else x
        return dropped

    def _look_up(self, tokens: Int[Tensor, "b l"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if self.tables > 1:
            check_token_range(tokens, self.vocab)
            # the tables lie one below the other in one matrix
            tokens = tokens + (positions.position_ids - 1) % self.tables * self.vocab
        try:
            x: Tensor = self.token(tokens)
        except IndexError:
            # looked for only now: one token takes little more time than a check
            raise_token_error(tokens, self.vocab)
            raise
        return x

    @property
    def max_length(self) -> int | None:
        return self.position.max_length

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"

    def read_source(
        self,
        source: Int[Tensor, "b s"],
        segments: Int[Tensor, "b s"] | None,
        layout: SegmentLayout = None,
        *,
        vectors: Float[Tensor, "b s d"] | None = None,
    ) -> EmbeddedSource:
        """The source; `vectors` are taken in place of those of its tokens, which then stand for their shape alone."""
        positions, _ = positions_of(source, segments, None, layout)
        check_length(source.shape[1], self.max_length)
        return EmbeddedSource(self(source if vectors is None else vectors, positions), positions)


@final
class FixedLengthSource(SourceEmbedding):
    """Sources of `tokens` tokens each: one for a class, as many as an image has values for an image."""

    vocab: int
    tokens: int

    def __init__(self, embed: TokenEmbedding, tokens: int) -> None:
        super().__init__()
        self.embed = embed
        self.vocab = embed.vocab
        self.tokens = tokens

    def read_source(
        self, source: Int[Tensor, "b s"], segments: Int[Tensor, "b s"] | None, layout: SegmentLayout = None
    ) -> EmbeddedSource:
        check_token_rows(source)
        if source.shape[1] != self.tokens:
            raise ValueError(f"a source has {self.tokens} tokens in this model, and these have {source.shape[1]}")
        positions, _ = positions_of(source, segments, None, layout)
        return EmbeddedSource(self.embed(source, positions), positions)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}"
