"""Multi-head attention: projections, a position, a source and a kernel; no variants inside."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State, TokenPositions
from manyformer.kernels import Kernel
from manyformer.masks.eviction import can_evict
from manyformer.position import NoPosition, Position
from manyformer.sources import KVSource, SelfSource, WindowSource
from manyformer.sources.kv_source import KVShape, ProjectKV


class AttentionState(NamedTuple):
    """What the source keeps of keys, and what the kernel keeps of them."""

    source: State
    kernel: State


@final
class Attention(Layer):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), the frame of every attention in the library.

    `kv_heads` below `heads` shares keys and values among groups of heads (Ainslie et al. 2023; 1 is Shazeer 2019);
    `head_dim` and `value_dim` are the widths per head, dim / heads unless given, and `out_dim` that of the output, else
    dim. Keys and values are projected by one matrix. Without a `source` it attends to its own stream and remembers of
    it what the kernel's mask can still show. Where the kernel `tied_qk`, the queries are the keys of the same tokens.
    `pre_norm` is a norm of all that is projected, also of what a source remembers, for branches whose memory is of the
    bare stream. Raises ValueError where widths do not divide, or where the position needs a seam that the kernel never
    forms."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kernel: Kernel,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        position: Position | None = None,
        source: KVSource | None = None,
        pre_norm: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if (head_dim is None or value_dim is None) and dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        self.position = NoPosition() if position is None else position
        if missing := self.position.required_seams() - {"embed"} - kernel.supports:
            names = f"{type(kernel).__name__} never forms {sorted(missing)}"
            raise ValueError(f"{names}, which {type(self.position).__name__} needs")
        if kernel.tied_qk and (source is not None or kv_heads != heads):
            raise ValueError(
                f"{type(kernel).__name__} takes keys as queries: it is for the own stream, with as many key heads "
                f"({kv_heads}) as heads ({heads})"
            )
        self.kernel, self.source = kernel, default_source(kernel) if source is None else source
        self.heads, self.pre_norm = heads, pre_norm
        head_dim, value_dim = (
            dim // heads if head_dim is None else head_dim,
            dim // heads if value_dim is None else value_dim,
        )
        # what a kernel asks of the stream for each token is projected and kept with the values
        self.kv_shape = KVShape(kv_heads, head_dim, value_dim + kernel.gate_dim)
        self.q_proj = None if kernel.tied_qk else nn.Linear(dim, heads * (head_dim + kernel.extra_query_dim), bias=bias)
        self.kv_proj = nn.Linear(dim, kv_heads * (head_dim + value_dim + kernel.gate_dim), bias=bias)
        self.out_proj = nn.Linear(heads * value_dim, dim if out_dim is None else out_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation of each of the projections by itself."""
        split = self.kv_shape.kv_heads * self.kv_shape.key
        queries = [] if self.q_proj is None else [self.q_proj]
        weights = [layer.weight for layer in queries]
        for weight in (*weights, self.kv_proj.weight[:split], self.kv_proj.weight[split:], self.out_proj.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (*queries, self.kv_proj, self.out_proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        folds = self.kernel.recurrent
        kept = self.source.init_state(batch, self.kv_shape, folds=folds, capacity=capacity, device=device, dtype=dtype)
        return AttentionState(kept, self.kernel.init_state(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        kept, folded = (None, None) if state is None else state
        q, project = self._queries(x, ctx.positions)
        k, v, place, kept, loss = self.source(x, ctx, project, kept, folds=self.kernel.recurrent)
        y, folded, extra = self.kernel(q, k, v, ctx.positions, place, self.position, folded, ctx.watch)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return LayerOutput(
            y, None if state is None else AttentionState(kept, folded), loss + extra + self.position.penalty()
        )

    def _queries(
        self, x: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> tuple[Float[Tensor, "b h l e"], ProjectKV]:
        """Queries, and what projects keys and values."""
        if self.q_proj is not None:
            normed = x if self.pre_norm is None else self.pre_norm(x)
            q = split_heads(self.q_proj(normed), self.heads)
            if not self.kernel.extra_query_dim:
                return self.position.query(q, positions), self.project
            q, asked = torch.split(q, [self.kv_shape.key, self.kernel.extra_query_dim], -1)
            return torch.cat([self.position.query(q, positions), asked], -1), self.project
        keys = self.project(x, positions)
        return keys[0], lambda *_: keys

    def project(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Keys (b, g, s, e) and values (b, g, s, f) of tokens at these places."""
        heads, key, value = self.kv_shape
        # one split, not two slices: its gradient is a single concatenation
        k, v = self.kv_proj(x if self.pre_norm is None else self.pre_norm(x)).split(
            [heads * key, heads * value], dim=-1
        )
        return self.position.key(split_heads(k, heads), positions), split_heads(v, heads)


def default_source(kernel: Kernel) -> KVSource:
    """The stream's own tokens, of which only those are kept that the kernel's mask can still show."""
    sight = kernel.cache_mask
    return SelfSource() if sight is None or kernel.recurrent or not can_evict(sight) else WindowSource(sight)


def split_heads(x: Float[Tensor, "b l he"], heads: int) -> Float[Tensor, "b h l e"]:
    """The channels of `x` as `heads` heads, each with its contiguous share, in front of the sequence axis."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)
