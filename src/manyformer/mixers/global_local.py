"""Attention with projections of its own for the few tokens that see everything."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import PADDING, SUMMARY, Context, Fronted, Layer, Out, Place, Plain, State, ignore
from manyformer.kernels import Softmax
from manyformer.masks import By, Everything, Mask, Not, Role, To, Tokens
from manyformer.masks.base import both, pick
from manyformer.ops.spelled import spell, spelled
from manyformer.position import NoPosition, Position


@final
class GlobalLocal(Layer):
    """Longformer's attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    Tokens attend by `local`, and to the global ones, with one set of projections; global tokens attend to everything
    with another set, which starts as a copy of the first. Both share the output projection. Where global tokens are
    few, nothing of that other set is computed for the rest. It sees both sides, so it keeps no state.
    """

    def __init__(self, dim: int, heads: int, local: Mask, tokens: Tokens, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.to_q, self.to_kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.global_q, self.global_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.tokens = tokens
        # each query in one of the two, zeros in the other
        self.local = Softmax((local | To(tokens)) & Not(By(tokens)), dropout=dropout)
        self.everywhere = Softmax(By(tokens), dropout=dropout, scale=(dim // heads) ** -0.5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation; the global projections begin as the local ones."""
        for weight in (self.to_q.weight, *self.to_kv.weight.data.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (self.to_q, self.to_kv, self.out):
            nn.init.zeros_(layer.bias)
        self.copy_projections()

    def copy_projections(self) -> None:
        """Let the global projections be what the local ones are now."""
        self.global_q.load_state_dict(self.to_q.state_dict())
        self.global_kv.load_state_dict(self.to_kv.state_dict())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        if state:
            raise ValueError("GlobalLocal sees both sides of every token: it cannot go on from a state")
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (split_heads(one, self.heads) for one in (q, k, v))
        y = self.local(q, k, v, ctx.place, ctx.place, NoPosition(), None, ctx.watch).y
        y = y + self._everywhere(x, ctx)
        return Out(self.out(y.transpose(1, 2).flatten(2)), state)

    def _everywhere(self, x: Float[Tensor, "b l d"], ctx: Context) -> Float[Tensor, "b h l e"]:
        """What global tokens get from all tokens, zeros for the others."""
        few = None if ctx.watch is not ignore else self._listed(ctx.place)
        at = ctx.place if few is None else pick(ctx.place, (torch.arange(len(few), device=few.device)[:, None], few))
        chosen = x if few is None else x.gather(1, few[..., None].expand(-1, -1, x.shape[-1]))
        q = split_heads(self.global_q(chosen), self.heads)
        if few is None or few.shape[1] * self.heads > x.shape[-1]:
            k, v = (split_heads(one, self.heads) for one in self.global_kv(x).chunk(2, dim=-1))
            y: Tensor = self.everywhere(q, k, v, at, ctx.place, NoPosition(), None, ctx.watch).y
        else:
            y = self._folded(q, x, at, ctx.place)
        if few is None:
            return y
        index = few[:, None, :, None].expand_as(y)
        every: Tensor = y.new_zeros(*y.shape[:2], x.shape[1], y.shape[-1]).scatter_add(2, index, y)
        return every

    def _folded(
        self, q: Float[Tensor, "b h g e"], x: Float[Tensor, "b l d"], at: Place, of: Place
    ) -> Float[Tensor, "b h g e"]:
        """The same without a key and a value of every token: q (W x) is (q W) x, and a constant key changes nothing."""
        to_k, to_v = (one.view(self.heads, -1, x.shape[-1]) for one in self.global_kv.weight.chunk(2))
        met = self.everywhere(q @ to_k, x[:, None], x[:, None], at, of, NoPosition()).y
        bias = self.global_kv.bias.chunk(2)[1].view(self.heads, 1, -1)
        chosen = self.tokens(at) & (at.seg != PADDING)
        y: Tensor = (met @ to_v.mT + bias) * chosen[:, None, :, None]
        return y

    def _listed(self, place: Place) -> Int[Tensor, "b g"] | None:
        """The global tokens of each row, filled up with others; None where that cannot be told beforehand."""
        layout = place.layout
        known = spell(layout, place.pos.shape[1]) if isinstance(layout, Plain | Fronted) and spelled(place) else place
        if known.pos.device.type == "meta" or torch.compiler.is_compiling():
            return None
        those = self.tokens(known) & (known.seg != PADDING)
        # one at least, so that all weights get a gradient
        most = max(int(those.sum(-1).max()), 1)
        order = those.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
        return order.to(place.pos.device).expand(place.pos.shape[0], -1)


@final
class Side(nn.Module):
    """What summaries, or the tokens of a text, are projected by: queries, and keys and values of either for them."""

    def __init__(self, dim: int, mask: Mask, position: Position) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.summaries, self.text = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.kernel, self.position = Softmax(mask), position
        for layer in (self.q, self.out, self.summaries, self.text):
            nn.init.zeros_(layer.bias)
            for weight in torch.split(layer.weight.data, dim):
                nn.init.xavier_uniform_(weight)


@final
class FourPieces(Layer):
    """ETC's attention without shared projections (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on global-local attention. Summaries see each other and the text as `g2l` says, tokens of the text see
    the summaries and each other as `l2l` says. Each of the four pieces has keys and values of its own, each side
    queries, outputs and positions; a query's two pieces share one softmax. The stream must come from `Summarised`.
    """

    def __init__(self, dim: int, heads: int, *, g2l: Mask, l2l: Mask, position: Callable[[], Position]) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        by, to = By(Role(SUMMARY)), To(Role(SUMMARY))
        self.summaries = Side(dim, by if g2l == Everything() else both(by, to | g2l), position())
        self.text = Side(dim, both(both(l2l, Not(to)) | to, Not(by)), position())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        place = ctx.place
        if not isinstance(place.layout, Fronted):
            raise ValueError("FourPieces needs summaries before the text: put it into Summarised")
        parts, sides = x.tensor_split([place.layout.front], 1), (self.summaries, self.text)
        q = torch.cat([side.q(part) for side, part in zip(sides, parts)], 1)
        y = torch.zeros((), dtype=x.dtype, device=x.device)
        for side in sides:
            # queries of the other side get zeros
            k, v = torch.cat([side.summaries(parts[0]), side.text(parts[1])], 1).chunk(2, dim=-1)
            seen = (split_heads(one, self.heads) for one in (q, k, v))
            y = y + side.kernel(*seen, place, place, side.position, None, ctx.watch).y
        outs = y.transpose(1, 2).flatten(2).tensor_split([place.layout.front], 1)
        return Out(torch.cat([side.out(one) for side, one in zip(sides, outs)], 1), state)
