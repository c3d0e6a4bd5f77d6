"""Attention with projections of its own for the few tokens that see everything."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import SUMMARY, Context, Fronted, Layer, Out, State
from manyformer.kernels import Softmax
from manyformer.masks import By, Everything, Mask, Not, Role, To, Tokens
from manyformer.masks.base import both
from manyformer.position import NoPosition, Position


@final
class GlobalLocal(Layer):
    """Longformer's attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    Tokens attend by `local`, and to the global ones, with one set of projections; global tokens attend to everything
    with another set, which starts as a copy of the first. Both share the output projection. It sees both sides, so it
    keeps no state.
    """

    def __init__(self, dim: int, heads: int, local: Mask, tokens: Tokens, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.to_q, self.to_kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.global_q, self.global_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        # each query in one of the two, zeros in the other
        self.local = Softmax((local | To(tokens)) & Not(By(tokens)), dropout=dropout)
        self.everywhere = Softmax(By(tokens), dropout=dropout)
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
        sides = ((self.local, self.to_q, self.to_kv), (self.everywhere, self.global_q, self.global_kv))
        y = torch.zeros((), dtype=x.dtype, device=x.device)
        for kernel, to_q, to_kv in sides:
            q, (k, v) = split_heads(to_q(x), self.heads), to_kv(x).chunk(2, dim=-1)
            keys, values = split_heads(k, self.heads), split_heads(v, self.heads)
            y = y + kernel(q, keys, values, ctx.place, ctx.place, NoPosition(), None, ctx.watch).y
        return Out(self.out(y.transpose(1, 2).flatten(2)), state)


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
