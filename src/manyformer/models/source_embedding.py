"""The interface of the embeddings that an encoder reads its source with."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from manyformer.batches.batch import SegmentLayout
from manyformer.core import TokenPositions


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
