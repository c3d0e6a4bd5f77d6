"""Token embedding with position encodings: the input of the residual stream."""

import math
from typing import final

from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches.batch import SegmentLayout
from manyformer.core import TokenPositions
from manyformer.dropout import Dropout
from manyformer.models.source_embedding import EmbeddedSource, SourceEmbedding
from manyformer.models.token_positions import check_length, check_token_range, positions_of, raise_token_error
from manyformer.position import NoPosition, Position, SentenceTypePosition


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

    def forward(self, tokens: Int[Tensor, "b l"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if self.tables > 1:
            check_token_range(tokens, self.vocab)
            tokens = tokens + (positions.position_ids - 1) % self.tables * self.vocab
        try:
            x = self.token(tokens)
        except IndexError:
            # looked for only now: one token takes little more time than a check
            raise_token_error(tokens, self.vocab)
            raise
        if self.scale != 1.0:
            x = x * self.scale
        x = self.position.embed(x, positions)
        if self.types is not None:
            x = self.types.embed(x, positions)
        x = x if self.norm is None else self.norm(x)
        # one token takes little more time than the call of a module
        dropped: Tensor = self.dropout(x) if self.training else x
        return dropped

    @property
    def max_length(self) -> int | None:
        return self.position.max_length

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"

    def read_source(
        self, source: Int[Tensor, "b s"], segments: Int[Tensor, "b s"] | None, layout: SegmentLayout = None
    ) -> EmbeddedSource:
        positions, _ = positions_of(source, segments, None, layout)
        check_length(source.shape[1], self.max_length)
        return EmbeddedSource(self(source, positions), positions)
