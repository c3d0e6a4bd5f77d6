"""Attention with projections of its own for the few tokens that see everything."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import (
    PADDING_SEGMENT,
    SUMMARY_ROLE,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PrefixedLayout,
    State,
    TokenPositions,
    no_watch,
)
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import AllKeys, AttendsToAll, Mask, NotMask, TokenSet, VisibleToAll, WithRole
from manyformer.masks.mask import simplify_and, take_tokens
from manyformer.ops.static_layout import layout_is_complete, materialize
from manyformer.position import NoPosition, Position


@final
class GlobalLocalAttention(Layer):
    """Longformer's attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    Tokens attend by `local`, and to the global ones, with one set of projections; global tokens attend to everything
    with another set, which starts as a copy of the first. Both share the output projection. Where global tokens are
    few, nothing of that other set is computed for the rest. It sees both sides, so it keeps no state.
    """

    def __init__(self, dim: int, heads: int, local: Mask, tokens: TokenSet, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.q_proj, self.kv_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.global_q, self.global_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.tokens = tokens
        # each query in one of the two, zeros in the other
        self.local = SoftmaxKernel((local | VisibleToAll(tokens)) & NotMask(AttendsToAll(tokens)), dropout=dropout)
        self.everywhere = SoftmaxKernel(AttendsToAll(tokens), dropout=dropout, scale=(dim // heads) ** -0.5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation; the global projections begin as the local ones."""
        for weight in (self.q_proj.weight, *self.kv_proj.weight.data.chunk(2), self.out_proj.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.zeros_(layer.bias)
        self.copy_projections()

    def copy_projections(self) -> None:
        """Let the global projections be what the local ones are now."""
        self.global_q.load_state_dict(self.q_proj.state_dict())
        self.global_kv.load_state_dict(self.kv_proj.state_dict())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("GlobalLocal sees both sides of every token: it cannot go on from a state")
        q, (k, v) = self.q_proj(x), self.kv_proj(x).chunk(2, dim=-1)
        q, k, v = (split_heads(one, self.heads) for one in (q, k, v))
        y = self.local(q, k, v, ctx.positions, ctx.positions, NoPosition(), None, ctx.watch).y
        y = y + self._everywhere(x, ctx)
        return LayerOutput(self.out_proj(y.transpose(1, 2).flatten(2)), state)

    def _everywhere(self, x: Float[Tensor, "b l d"], ctx: Context) -> Float[Tensor, "b h l e"]:
        """What global tokens get from all tokens, zeros for the others."""
        few = None if ctx.watch is not no_watch else self._listed(ctx.positions)
        at = (
            ctx.positions
            if few is None
            else take_tokens(ctx.positions, (torch.arange(len(few), device=few.device)[:, None], few))
        )
        chosen = x if few is None else x.gather(1, few[..., None].expand(-1, -1, x.shape[-1]))
        q = split_heads(self.global_q(chosen), self.heads)
        if few is None or few.shape[1] * self.heads > x.shape[-1]:
            k, v = (split_heads(one, self.heads) for one in self.global_kv(x).chunk(2, dim=-1))
            y: Tensor = self.everywhere(q, k, v, at, ctx.positions, NoPosition(), None, ctx.watch).y
        else:
            y = self._folded(q, x, at, ctx.positions)
        if few is None:
            return y
        index = few[:, None, :, None].expand_as(y)
        every: Tensor = y.new_zeros(*y.shape[:2], x.shape[1], y.shape[-1]).scatter_add(2, index, y)
        return every

    def _folded(
        self,
        q: Float[Tensor, "b h g e"],
        x: Float[Tensor, "b l d"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h g e"]:
        """The same without a key and a value of every token: q (W x) is (q W) x, and a constant key changes nothing."""
        k_proj, v_proj = (one.view(self.heads, -1, x.shape[-1]) for one in self.global_kv.weight.chunk(2))
        met = self.everywhere(q @ k_proj, x[:, None], x[:, None], query_positions, key_positions, NoPosition()).y
        bias = self.global_kv.bias.chunk(2)[1].view(self.heads, 1, -1)
        chosen = self.tokens(query_positions) & (query_positions.segment_ids != PADDING_SEGMENT)
        y: Tensor = (met @ v_proj.mT + bias) * chosen[:, None, :, None]
        return y

    def _listed(self, positions: TokenPositions) -> Int[Tensor, "b g"] | None:
        """The global tokens of each row, filled up with others; None where that cannot be told beforehand."""
        layout = positions.layout
        known = (
            materialize(layout, positions.position_ids.shape[1])
            if isinstance(layout, ContiguousLayout | PrefixedLayout) and layout_is_complete(positions)
            else positions
        )
        if known.position_ids.device.type == "meta" or torch.compiler.is_compiling():
            return None
        those = self.tokens(known) & (known.segment_ids != PADDING_SEGMENT)
        # one at least, so that all weights get a gradient
        most = max(int(those.sum(-1).max()), 1)
        order = those.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
        return order.to(positions.position_ids.device).expand(positions.position_ids.shape[0], -1)


@final
class SideProjections(nn.Module):
    """What summaries, or the tokens of a text, are projected by: queries, and keys and values of either for them."""

    def __init__(self, dim: int, mask: Mask, position: Position) -> None:
        super().__init__()
        self.q, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.summaries, self.text = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.kernel, self.position = SoftmaxKernel(mask), position
        for layer in (self.q, self.out_proj, self.summaries, self.text):
            nn.init.zeros_(layer.bias)
            for weight in torch.split(layer.weight.data, dim):
                nn.init.xavier_uniform_(weight)


@final
class FourPieceAttention(Layer):
    """ETC's attention without shared projections (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on global-local attention. Summaries see each other and the text as `g2l` says, tokens of the text see
    the summaries and each other as `l2l` says. Each of the four pieces has keys and values of its own, each side
    queries, outputs and positions; a query's two pieces share one softmax. The stream must come from
    `SummaryPrefixedLayer`."""

    def __init__(self, dim: int, heads: int, *, g2l: Mask, l2l: Mask, position: Callable[[], Position]) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        by, to = AttendsToAll(WithRole(SUMMARY_ROLE)), VisibleToAll(WithRole(SUMMARY_ROLE))
        self.summaries = SideProjections(dim, by if g2l == AllKeys() else simplify_and(by, to | g2l), position())
        self.text = SideProjections(dim, simplify_and(simplify_and(l2l, NotMask(to)) | to, NotMask(by)), position())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        place = ctx.positions
        if not isinstance(place.layout, PrefixedLayout):
            raise ValueError("FourPieces needs summaries before the text: put it into Summarised")
        parts, sides = x.tensor_split([place.layout.prefix], 1), (self.summaries, self.text)
        q = torch.cat([side.q(part) for side, part in zip(sides, parts)], 1)
        y = torch.zeros((), dtype=x.dtype, device=x.device)
        for side in sides:
            # queries of the other side get zeros
            k, v = torch.cat([side.summaries(parts[0]), side.text(parts[1])], 1).chunk(2, dim=-1)
            seen = (split_heads(one, self.heads) for one in (q, k, v))
            y = y + side.kernel(*seen, place, place, side.position, None, ctx.watch).y
        outs = y.transpose(1, 2).flatten(2).tensor_split([place.layout.prefix], 1)
        return LayerOutput(torch.cat([side.out_proj(one) for side, one in zip(sides, outs)], 1), state)
