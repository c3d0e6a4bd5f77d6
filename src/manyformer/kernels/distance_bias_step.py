"""Softmax attention of one new token per row under a position that adds a bias by distance to the scores."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyformer.core import State, TokenPositions
from manyformer.kernels.kernel import AttendStep
from manyformer.position import Position


def bind_distance_bias(position: Position, *, scale: float, is_grouped: bool) -> AttendStep | None:
    """Attention to all keys of one contiguous document, which the query is the last token of.

    None unless the position is a bias by distance in the scores, and nothing else there."""
    terms = position.distance_terms(1, 0)
    if terms is None or terms.bias is None or not (terms.keys is terms.values is terms.query_bias is None):
        return None
    table = _BiasTable(position)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, positions: TokenPositions, state: State
    ) -> tuple[Tensor, State]:
        bias = table.of_keys(k.shape[2], q)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=is_grouped), state

    return AttendStep(attend, stateless=True)


class _BiasTable:
    """The biases of the distances so far, computed again for twice as many where there are more."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.bias: Float[Tensor, "1 #h 1 r"] | None = None

    def of_keys(self, count: int, like: Tensor) -> Float[Tensor, "1 #h 1 s"]:
        """The biases of `count` keys, the last of which is the query's own."""
        if self.bias is None or self.bias.shape[-1] < count:
            self.bias = self._compute(2 * count).to(like.dtype)
        return self.bias[..., -count:]

    def _compute(self, count: int) -> Float[Tensor, "1 #h 1 r"]:
        terms = self.position.distance_terms(count - 1, 0)
        assert terms is not None
        assert terms.bias is not None
        # the first column serves all larger distances
        farther = terms.bias[:, :1].expand(-1, count - 1 - terms.lookback)
        return torch.cat([farther, terms.bias], -1)[None, :, None]
