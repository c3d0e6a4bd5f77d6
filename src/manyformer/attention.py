"""Multi-head attention: projections, a position, a source and a kernel; no variants inside."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, Out, Place, State
from manyformer.kernels import Kernel
from manyformer.masks.lasting import forgets
from manyformer.position import NoPosition, Position
from manyformer.sources import Own, Recent, Source
from manyformer.sources.base import Project, Shape


class AttentionState(NamedTuple):
    """What the source keeps of keys, and what the kernel keeps of them."""

    source: State
    kernel: State


@final
class Attention(Layer):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), the frame of every attention in the library.

    `kv_heads` below `heads` shares keys and values among groups of heads (Ainslie et al. 2023; 1 is Shazeer 2019);
    `key` and `value` are the widths per head, dim / heads unless given, and `to` that of the output, else dim. Keys and
    values are projected by one matrix.
    Without a `source` it attends to its own stream and remembers of it what the kernel's mask can still show. Where the
    kernel `shares`, the queries are the keys of the same tokens. `before` is a norm of all that is projected, also of
    what a source remembers, for branches whose memory is of the bare stream. Raises ValueError where widths do not
    divide, or where the position needs a seam that the kernel never forms.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kernel: Kernel,
        *,
        kv_heads: int | None = None,
        key: int | None = None,
        value: int | None = None,
        to: int | None = None,
        position: Position | None = None,
        source: Source | None = None,
        before: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if (key is None or value is None) and dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        self.position = NoPosition() if position is None else position
        if missing := self.position.touches() - {"embed"} - kernel.honours:
            names = f"{type(kernel).__name__} never forms {sorted(missing)}"
            raise ValueError(f"{names}, which {type(self.position).__name__} needs")
        if kernel.shares and (source is not None or kv_heads != heads):
            raise ValueError(
                f"{type(kernel).__name__} takes keys as queries: it is for the own stream, with as many key heads "
                f"({kv_heads}) as heads ({heads})"
            )
        self.kernel, self.source = kernel, own_source(kernel) if source is None else source
        self.heads, self.before = heads, before
        key, value = dim // heads if key is None else key, dim // heads if value is None else value
        # what a kernel asks of the stream for each token is projected and kept with the values
        self.shape = Shape(kv_heads, key, value + kernel.gates)
        self.to_q = None if kernel.shares else nn.Linear(dim, heads * (key + kernel.asks), bias=bias)
        self.to_kv = nn.Linear(dim, kv_heads * (key + value + kernel.gates), bias=bias)
        self.out = nn.Linear(heads * value, dim if to is None else to, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation of each of the projections by itself."""
        split = self.shape.kv_heads * self.shape.key
        queries = [] if self.to_q is None else [self.to_q]
        weights = [layer.weight for layer in queries]
        for weight in (*weights, self.to_kv.weight[:split], self.to_kv.weight[split:], self.out.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (*queries, self.to_kv, self.out):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        folds = self.kernel.folds
        kept = self.source.start(batch, self.shape, folds=folds, capacity=capacity, device=device, dtype=dtype)
        return AttentionState(kept, self.kernel.start(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        kept, folded = (None, None) if state is None else state
        q, project = self._queries(x, ctx.place)
        k, v, place, kept, loss = self.source(x, ctx, project, kept, folds=self.kernel.folds)
        y, folded, extra = self.kernel(q, k, v, ctx.place, place, self.position, folded, ctx.watch)
        y = self.out(y.transpose(1, 2).flatten(2))
        return Out(y, None if state is None else AttentionState(kept, folded), loss + extra + self.position.penalty())

    def _queries(self, x: Float[Tensor, "b l d"], place: Place) -> tuple[Float[Tensor, "b h l e"], Project]:
        """Queries, and what projects keys and values."""
        if self.to_q is not None:
            normed = x if self.before is None else self.before(x)
            q = split_heads(self.to_q(normed), self.heads)
            if not self.kernel.asks:
                return self.position.query(q, place), self.project
            q, asked = torch.split(q, [self.shape.key, self.kernel.asks], -1)
            return torch.cat([self.position.query(q, place), asked], -1), self.project
        keys = self.project(x, place)
        return keys[0], lambda *_: keys

    def project(self, x: Float[Tensor, "b s d"], place: Place) -> tuple[Tensor, Tensor]:
        """Keys (b, g, s, e) and values (b, g, s, f) of tokens at these places."""
        heads, key, value = self.shape
        # one split, not two slices: its gradient is a single concatenation
        k, v = self.to_kv(x if self.before is None else self.before(x)).split([heads * key, heads * value], dim=-1)
        return self.position.key(split_heads(k, heads), place), split_heads(v, heads)


def own_source(kernel: Kernel) -> Source:
    """The stream's own tokens, of which only those are kept that the kernel's mask can still show."""
    sight = kernel.sight
    return Own() if sight is None or kernel.folds or not forgets(sight) else Recent(sight)


def split_heads(x: Float[Tensor, "b l he"], heads: int) -> Float[Tensor, "b h l e"]:
    """The channels of `x` as `heads` heads, each with its contiguous share, in front of the sequence axis."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)
