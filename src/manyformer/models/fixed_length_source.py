"""A source of one length, such as a class or all values of a small image, as embedded tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches.batch import SegmentLayout
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.source_embedding import EmbeddedSource, SourceEmbedding
from manyformer.models.token_positions import check_token_rows, positions_of


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
