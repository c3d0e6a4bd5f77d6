"""Transformer-XL's relative positions: how far away a key is, by a projected sinusoid of the distance."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, AlignedLayout, ContiguousLayout, TokenPositions
from manyformer.position.distance_terms import DistanceTerms, distance, toeplitz_view
from manyformer.position.position import Position
from manyformer.position.sinusoid_table import check_waves, sinusoid_table

FARTHEST_KEPT = 1 << 13
"""Sinusoids of larger distances are computed when they are needed."""


ROOM = 256
"""So many more distances are projected than are asked for, where the next tokens will ask for them."""


@final
class TransformerXLBiases(nn.Module):
    """The vectors u and v for each head that stand for a query without content (Dai et al. 2019, section 3.3).

    In the paper all layers share them: give the same object to each.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.randn(heads, width) * 0.02) for _ in range(2))


@final
class TransformerXLPosition(Position):
    """Scores ((q_i + u) k_j + (q_i + v) W R_{i-j}) / sqrt(e), R the sinusoid (Dai et al. 2019, arXiv:1901.02860, 3.3).

    Distances are those of places, also negative ones: any mask will do, any cache and any memory; there is no table to
    shift. `dim` is the width of R, `width` that of a head, dim / heads unless given. `biases` are u and v, own ones
    unless given. Distances beyond `clamp` count as it; the authors set it for evaluation only, so it may be assigned
    later. `dropout` acts on R while training. As in the paper, scores must be scaled by 1 / sqrt(e), which is what
    `SoftmaxKernel` does unless told otherwise. The paper's projections have no biases: `Attention(bias=False)`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        width: int | None = None,
        biases: TransformerXLBiases | None = None,
        clamp: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_waves(dim, "halves", "XL")
        if width is None and dim % heads:
            raise ValueError(f"XL: dim ({dim}) must be a multiple of heads ({heads})")
        width = dim // heads if width is None else width
        if biases is not None and biases.u.shape != (heads, width):
            raise ValueError(f"XL: biases of shape {tuple(biases.u.shape)} do not fit {heads} heads of width {width}")
        self.dim, self.heads, self.clamp = dim, heads, clamp
        self.biases = TransformerXLBiases(heads, width) if biases is None else biases
        self.to_r = nn.Linear(dim, heads * width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.to_r.weight, std=0.02)
        # no buffer: converting the model to another type must not round the table
        self._table: Tensor | None = None
        self._kept: tuple[tuple[object, ...], int, int, Tensor] | None = None

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        # the kernel's own product then is the whole content term
        return q + self.biases.u[:, None]

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        ahead, back, front = _spread(query_positions, key_positions)
        rows = self.rows(back, front)
        each: Tensor = (q + (self.biases.v - self.biases.u)[:, None]) @ rows.mT * q.shape[-1] ** -0.5
        if ahead is None:
            return logits + toeplitz_view(each, k.shape[2])
        return logits + each.gather(-1, (ahead + back)[:, None].expand(logits.shape))

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms:
        rows = self.rows(back, ahead) * (self.to_r.out_features // self.heads) ** -0.5
        return DistanceTerms(back, ahead, keys=rows, turn=self.biases.v - self.biases.u)

    def rows(self, back: int, ahead: int) -> Float[Tensor, "h r e"]:
        """W R for keys from `back` before to `ahead` after their query, the farthest in the past first."""
        weight, kind = self.to_r.weight, self.to_r.weight.device.type
        # weights that were made in inference mode do not tell when they change
        changing = torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.is_inference()
        if changing or (self.training and self.dropout.p):
            return self._rows(back, ahead)
        # for one token more, projecting all distances would take longer than all else
        half = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        same = (weight.data_ptr(), weight._version, weight.dtype, weight.device, half, self.clamp)
        if self._kept is None or self._kept[0] != same or back > self._kept[1] or ahead > self._kept[2]:
            far = max(back, 0) + ROOM, max(ahead, 0)
            # outside inference mode: see `_fixed`
            with torch.inference_mode(mode=False), torch.no_grad():
                self._kept = same, *far, self._rows(*far)
        begin = self._kept[1] - back
        return self._kept[3][:, begin : begin + back + ahead + 1]

    def _rows(self, back: int, ahead: int) -> Float[Tensor, "h r e"]:
        rows: Tensor = self.to_r(self.dropout(self._fixed(back, ahead).to(self.to_r.weight.dtype)))
        return rows.view(len(rows), self.heads, -1).transpose(0, 1)

    def _fixed(self, back: int, ahead: int) -> Float[Tensor, "r d"]:
        """R for these distances, from a table where one is worth keeping: sines take longer than what follows."""
        device = self.to_r.weight.device
        asked = torch.arange(-back, ahead + 1, device=device)
        if self.clamp is not None:
            asked = asked.clamp(-self.clamp, self.clamp)
        far = max(abs(back), abs(ahead))
        if far > FARTHEST_KEPT or torch.compiler.is_compiling():
            return sinusoid_table(-asked, self.dim, "halves")
        if self._table is None or far > len(self._table) // 2 or self._table.device != device:
            far = min(2 * far, FARTHEST_KEPT)
            # outside inference mode, whose tensors could not be used in training later
            with torch.inference_mode(mode=False):
                self._table = sinusoid_table(-torch.arange(-far, far + 1, device=device), self.dim, "halves")
        middle = len(self._table) // 2
        if self.clamp is not None:
            return self._table[asked + middle]
        return self._table[middle - back : middle + ahead + 1]

    # torch's own signature
    def train(self, mode: bool = True) -> "TransformerXLPosition":  # noqa: FBT001, FBT002
        # weights that come and go, as those in shards do, may change without a trace
        self._kept = None
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self.heads} heads" + (f", clamp={self.clamp}" if self.clamp is not None else "")


def _spread(
    query_positions: TokenPositions, key_positions: TokenPositions
) -> tuple[Int[Tensor, "b l s"] | None, int, int]:
    """How far each key is ahead of each query, None where both stand side by side; and the farthest behind and ahead.

    Pairs that never meet, of different documents or with padding, count as no distance.
    """
    if isinstance(query_positions.layout, ContiguousLayout | AlignedLayout) and isinstance(
        key_positions.layout, ContiguousLayout | AlignedLayout
    ):
        first = key_positions.layout.start - query_positions.layout.start
        return None, query_positions.position_ids.shape[1] - 1 - first, first + key_positions.position_ids.shape[1] - 1
    # a look at the numbers; a GPU is waited for
    meet = (query_positions.segment_ids[:, :, None] == key_positions.segment_ids[:, None, :]) & (
        key_positions.segment_ids[:, None, :] != PADDING_SEGMENT
    )
    ahead = torch.where(meet, distance(query_positions, key_positions), 0)
    if not ahead.numel():
        return ahead, 0, 0
    least, most = (int(edge) for edge in torch.aminmax(ahead))
    return ahead, -least, most
