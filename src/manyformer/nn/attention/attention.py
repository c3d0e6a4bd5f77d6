"""Attention as a layer: what has heads, and the one layer of projections, a position, a source and a kernel."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KVShape, KVSource, ProjectKV, SelfSource
from manyformer.nn.attention.kv_cache.window_cache import WindowSource
from manyformer.nn.attention.output_stages import OutputStage
from manyformer.nn.attention.value_stages import ValueStage
from manyformer.nn.convolution.depthwise_convolution import ShortConvolution
from manyformer.nn.core import Context, Layer, LayerOutput, State, TokenPositions
from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.nn.masks import Causal, Mask, PerHead
from manyformer.nn.masks.eviction import can_evict
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.head_selection import (
    HeadSelection,
    PerHeadTensors,
    head_channels,
    select_head_inputs,
    select_head_outputs,
    select_outputs,
)
from manyformer.nn.runtime.module_places import share_again, shared_tensors
from manyformer.nn.runtime.training_hooks import FusedRows


class MultiHeadLayer(Layer, ABC):
    """A layer with heads whose outputs `merge_heads` concatenates for the output projection.

    `head_gates` maps the outputs of all heads (b, h, l, f) to gated ones; None, as built, leaves them as they are.
    """

    heads: int
    out_proj: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.head_gates: nn.Module | None = None

    def merge_heads(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b l hf"]:
        """The outputs of all heads, gated, side by side for each token."""
        gated = y if self.head_gates is None else self.head_gates(y)
        return gated.transpose(1, 2).flatten(2)

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Remove all heads but these, numbers in ascending order, in place; at least one must remain.

        Raises ValueError where the others share keys in a way that cannot remain."""
        selection = self.select_heads(tuple(heads))
        self.select_projections(selection)
        modules = [module for module in self.modules() if module is not self]
        shared = shared_tensors(self)
        for module in modules:
            if isinstance(module, PerHeadTensors):
                module.keep_heads(selection)
        share_again(shared)
        # masks are no modules; what differs by head in them is numbered anew, as the heads are
        for module in (self, *modules):
            for name in ("mask", "cache_mask"):
                mask = getattr(module, name, None)
                if isinstance(mask, Mask) and mask.per_head:
                    setattr(module, name, PerHead({n: mask.for_head(head) for n, head in enumerate(heads)}))
        self.heads = len(heads)

    def select_heads(self, heads: tuple[int, ...]) -> HeadSelection:
        """The selection of these heads; every head has its own keys unless a layer says otherwise."""
        return HeadSelection(heads, self.heads, heads, self.heads)

    @property
    def head_group(self) -> int:
        """The number of adjacent heads that can only be removed together."""
        return 1

    def output_projections(self) -> Sequence[nn.Linear]:
        """The linear maps that read the outputs of all heads."""
        return (self.out_proj,)

    @abstractmethod
    def select_projections(self, selection: HeadSelection) -> None:
        """Remove the rows and columns of all other heads from the layer's projections, in place."""

    def without_heads(self) -> Layer:
        """What remains of the layer when no head does: the bias of its output projection.

        Raises ValueError where the layer needs at least one."""
        return HeadlessLayer(self.out_proj)


@final
class HeadlessLayer(Layer):
    """What attention without heads adds to the stream: the bias of its output projection, nothing if it has none."""

    def __init__(self, out_proj: nn.Linear) -> None:
        super().__init__()
        self.dim = out_proj.out_features
        self.bias = out_proj.bias

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        # no token is read any more: all of them get the same vector
        zeros = x.new_zeros(*x.shape[:2], self.dim)
        return LayerOutput(zeros if self.bias is None else zeros + self.bias.to(x.dtype), state)


class AttentionState(NamedTuple):
    """The states of an attention layer's source (cached keys and values), its kernel and its short convolution."""

    source: State
    kernel: State
    convolution: State = None


@final
class Attention(MultiHeadLayer, FusedRows):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), which every attention of the library configures.

    `kv_heads` below `heads` shares keys and values among groups of heads (Ainslie et al. 2023; 1 is Shazeer 2019);
    `head_dim` and `value_dim` are the widths per head, dim / heads by default, and `out_dim` that of the output, dim by
    default; `source_dim` is that of what a `source` projects, if it is another. Keys and values are projected by one
    matrix. Without a `source` the layer attends to its own input and caches the tokens that the kernel's mask can still
    make visible. If `kernel.tied_qk`, the queries are the keys of the same tokens. `pre_norm` normalizes everything
    that is projected, including the inputs that a source remembers, for branches whose memory holds the stream before
    the norm. `bias` gives all projections a bias, but `out_bias` decides for the output's.

    Three parts are those of recurrent layers, and of some with softmax. `short_convolution` mixes the projected
    queries, keys and values with those of the tokens before, before they become heads. `key_heads` below `heads` are
    the heads of queries and keys, which adjacent heads of values and gates share. `output_stage` maps the outputs of
    the heads to those that the output projection reads. `value_stages` change the projected values, before they are
    cached, by what the tokens are or by the values of another layer. Raises ValueError if widths do not divide, if the
    position encoding acts on something that the kernel does not let it act on, or if parts exclude each other."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kernel: Kernel,
        *,
        kv_heads: int | None = None,
        key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        source_dim: int | None = None,
        position: Position | None = None,
        source: KVSource | None = None,
        pre_norm: nn.Module | None = None,
        short_convolution: ShortConvolution | None = None,
        output_stage: OutputStage | None = None,
        value_stages: Sequence[ValueStage] = (),
        bias: bool = True,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        if (head_dim is None or value_dim is None) and dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        self.position = NoPosition() if position is None else position
        check_position(self.position, kernel)
        check_tied_kernel(kernel, kv_heads, heads, uses_own_source=source is None)
        self.kernel = kernel
        self.source = default_source(kernel) if source is None else source
        self.key_origin = self.source.key_origin
        # keys of another sequence do not change with tokens of the stream
        self.keeps_tokens = self.key_origin == "stream"
        self.heads = heads
        self.pre_norm = pre_norm
        self.key_heads = kv_heads if key_heads is None else key_heads
        self.short_convolution = short_convolution
        self.output_stage = output_stage
        self.value_stages: nn.ModuleList | None = None
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = dim // heads if value_dim is None else value_dim
        # the gates that a kernel needs for each token are projected and cached together with the values
        self.kv_shape = KVShape(kv_heads, head_dim, value_dim + kernel.gate_dim)
        query_heads = heads if key_heads is None else key_heads
        query_dim = query_heads * (head_dim + kernel.extra_query_dim)
        if kernel.tied_qk:
            self.q_proj = None
        else:
            self.q_proj = nn.Linear(dim, query_dim, bias=bias)
        # gates come out of the projection of values, unless the kernel has a projection of its own
        projects_gates = kernel.gate_dim > 0 and kernel.gate_projection is None
        projected_gates = kernel.gate_dim if projects_gates else 0
        kv_dim = self.key_heads * head_dim + kv_heads * (value_dim + projected_gates)
        self.kv_proj = nn.Linear(dim if source_dim is None else source_dim, kv_dim, bias=bias)
        check_key_heads(kernel, self.key_heads, kv_heads, heads)
        if short_convolution is not None:
            check_convolved_kernel(kernel, uses_own_source=source is None)
        if value_stages:
            self.set_value_stages(value_stages)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(heads * value_dim, dim if out_dim is None else out_dim, bias=out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each projection separately with Glorot's uniform distribution."""
        num_key_rows = self.key_heads * self.kv_shape.head_dim
        for layer in (self.q_proj, self.kv_proj, self.out_proj):
            if layer is None:
                continue
            # keys and values share one matrix, and Glorot's limit depends on the rows of each alone
            for weight in layer.weight.data.tensor_split([num_key_rows] if layer is self.kv_proj else []):
                nn.init.xavier_uniform_(weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        kv_heads, head_dim, value_dim = self.kv_shape
        if self.kernel.gate_projection is not None:
            value_dim -= self.kernel.gate_dim
        # gates that the layer projects with the values are rows of their heads
        return {"kv_proj.weight": (self.key_heads * head_dim, kv_heads * value_dim)}

    def set_value_stages(self, stages: Sequence[ValueStage]) -> None:
        """Change projected values by these stages. Raises ValueError where keys and values are not the layer's own."""
        if not self._reads_itself or self.kernel.gate_dim or self.kernel.tied_qk:
            raise ValueError(
                f"{type(self.kernel).__name__} needs self-attention whose values are projected without gates"
            )
        self.value_stages = nn.ModuleList(stages)

    def set_convolution(self, size: int) -> None:
        """Add a convolution of queries, keys and values to these. Raises ValueError where they cannot be convolved."""
        if self.short_convolution is not None or self.q_proj is None:
            raise ValueError("queries, keys and values are convolved already, or are not projected apart")
        check_convolved_kernel(self.kernel, uses_own_source=self._reads_itself)
        channels = self.q_proj.out_features + self.kv_proj.out_features
        self.short_convolution = ShortConvolution(channels, size, residual=True)

    @property
    def _reads_itself(self) -> bool:
        """Whether its source is the one that layers have by default: their own input."""
        return type(self.source) is type(default_source(self.kernel))

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        spec = CacheSpec(batch, self.kv_shape, capacity, device, dtype, self.kernel.recurrent)
        convolution = self.short_convolution
        convolved = None
        if convolution is not None:
            convolved = convolution.init_state(batch, device=device, dtype=dtype)
        kernel_state = self.kernel.init_state(batch, device=device, dtype=dtype)
        return AttentionState(self.source.init_state(spec), kernel_state, convolved)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        source_state, kernel_state, convolved = (None, None, None) if state is None else state
        if self.short_convolution is None:
            q, project_kv = self._project_queries(x, ctx.positions)
        else:
            # queries, keys and values are convolved in one pass, so that keys are there before the source asks for them
            q, project_kv, convolved = self._project_convolved(x, ctx.positions, self.short_convolution, convolved)
        k, v, key_positions, source_state, loss = self.source(x, ctx, project_kv, source_state)
        call = KernelCall(q, k, v, ctx.positions, key_positions, self.position, kernel_state, ctx.watch)
        y, kernel_state, kernel_loss = self.kernel(call)
        next_state = None
        if state is not None:
            next_state = AttentionState(source_state, kernel_state, convolved)
        if self.output_stage is not None:
            # gates read what the queries are projected of
            y = self.output_stage(y, x if self.pre_norm is None else self.pre_norm(x))
        y = self.out_proj(self.merge_heads(y))
        loss = loss + kernel_loss
        if "penalty" in self.position.overridden:
            loss = loss + self.position.penalty()
        return LayerOutput(y, next_state, loss)

    def extend_state(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> State:
        # a kernel's own state, and that of a convolution, change with every token
        if self.q_proj is None or self.short_convolution is not None or state.kernel != ():
            return super().extend_state(x, ctx, state)
        # such a kernel keeps nothing, so that keys and values are all that later tokens need
        return AttentionState(self.source(x, ctx, self.project_kv, state.source).state, state.kernel)

    def _project_queries(
        self, x: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> tuple[Float[Tensor, "b h l e"], ProjectKV]:
        """The queries, and the function that projects keys and values."""
        if self.q_proj is not None:
            normed = x if self.pre_norm is None else self.pre_norm(x)
            return self._split_queries(self.q_proj(normed), positions), self.project_kv
        keys_values = self.project_kv(x, positions)
        # tied queries are the keys, so that the source gets what is projected already
        return keys_values[0], lambda *_: keys_values

    def _project_convolved(
        self, x: Float[Tensor, "b l d"], positions: TokenPositions, convolution: ShortConvolution, state: State
    ) -> tuple[Float[Tensor, "b h l e"], ProjectKV, State]:
        """The convolved queries, a function that returns the convolved keys and values, and the next state."""
        assert self.q_proj is not None
        normed = x if self.pre_norm is None else self.pre_norm(x)
        (q, keys_values), state = convolution([self.q_proj(normed), self.kv_proj(normed)], positions, state)
        projected = self._split_keys_values(keys_values, normed, positions)
        return self._split_queries(q, positions), lambda *_: projected, state

    def project_kv(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Keys (b, g, s, e) and values (b, g, s, f) of tokens at these positions."""
        normed = x if self.pre_norm is None else self.pre_norm(x)
        return self._split_keys_values(self.kv_proj(normed), normed, positions)

    def _split_queries(self, q: Float[Tensor, "b l n"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        """Queries of all heads, with the position applied."""
        width = self.kv_shape.head_dim + self.kernel.extra_query_dim
        q = split_heads(q, q.shape[-1] // width)
        extra_queries = None
        if self.kernel.extra_query_dim:
            # the extra channels belong to the kernel alone, positions do not act on them
            q, extra_queries = torch.split(q, [self.kv_shape.head_dim, self.kernel.extra_query_dim], -1)
        if "query" in self.position.overridden:
            q = self.position.query(q, positions)
        if extra_queries is None:
            return _repeat_heads(q, self.heads)
        return torch.cat([q, extra_queries], -1)

    def _split_keys_values(
        self, keys_values: Float[Tensor, "b s n"], x: Float[Tensor, "b s d"], positions: TokenPositions
    ) -> tuple[Float[Tensor, "b g s e"], Float[Tensor, "b g s f"]]:
        """Keys, with the position applied, and values with the kernel's gates, which it may project itself of `x`."""
        kv_heads = self.kv_shape.kv_heads
        key_dim = self.key_heads * self.kv_shape.head_dim
        # one split, not two slices: its gradient is a single concatenation
        k, v = torch.split(keys_values, [key_dim, keys_values.shape[-1] - key_dim], dim=-1)
        k = split_heads(k, self.key_heads)
        v = split_heads(v, kv_heads)
        if self.value_stages is not None:
            for stage in self.value_stages:
                v = stage(v, x, positions)
        if self.kernel.gate_dim and self.kernel.gate_projection is not None:
            v = torch.cat([v, self.kernel.gate_projection(x).to(v.dtype)], -1)
        if "key" in self.position.overridden:
            k = self.position.key(k, positions)
        # after the position, which has less to do for fewer heads
        return _repeat_heads(k, kv_heads), v

    @property
    def head_group(self) -> int:
        # with one key head for all, single query heads can go
        if self.kv_shape.kv_heads == 1:
            return 1
        return self.heads // self.kv_shape.kv_heads

    def select_heads(self, heads: tuple[int, ...]) -> HeadSelection:
        if self.output_stage is not None and self.output_stage.couples_heads:
            raise ValueError("the norm of the outputs is one of several heads together: none of them can be removed")
        if self.position.couples_heads:
            raise ValueError("queries and keys are normalized over all heads together: none of them can be removed")
        if self.kernel.couples_heads:
            raise ValueError(f"{type(self.kernel).__name__} computes heads from one another: none can be removed")
        if any(stage.couples_layers for stage in self.value_stages or ()):
            raise ValueError("the layers mix values of the same heads: none of them can be removed from one layer")
        if self.key_heads != self.kv_shape.kv_heads:
            raise ValueError(f"{self.heads} heads share {self.key_heads} heads of keys: none of them can be removed")
        kv_heads = self.kv_shape.kv_heads
        group = self.heads // self.kv_shape.kv_heads
        counts = Counter(head // group for head in heads)
        if len(set(counts.values())) > 1:
            remedy = "remove whole groups, or equally many heads of each"
            raise ValueError(f"{kv_heads} groups of {group} heads share keys and values: {remedy}")
        return HeadSelection(heads, self.heads, tuple(sorted(counts)), kv_heads)

    def select_projections(self, selection: HeadSelection) -> None:
        kv_total, key, value = self.kv_shape
        groups = selection.kv_heads
        if self.q_proj is not None:
            select_head_outputs(self.q_proj, selection)
        if self.kernel.gate_projection is not None:
            value = value - self.kernel.gate_dim
        value_channels = [kv_total * key + channel for channel in head_channels(groups, value)]
        channels = head_channels(groups, key) + value_channels
        select_outputs(self.kv_proj, channels)
        if self.short_convolution is not None:
            queries = selection.total * key
            mixed = head_channels(selection.heads, key) + [queries + channel for channel in channels]
            self.short_convolution.keep_channels(mixed)
        select_head_inputs(self.out_proj, selection)
        self.kv_shape = self.kv_shape._replace(kv_heads=len(groups))
        self.key_heads = len(groups)

    def without_heads(self) -> Layer:
        if self.source.needs_heads:
            raise ValueError(f"the memory of {type(self.source).__name__} needs at least one head")
        return super().without_heads()

    def extra_repr(self) -> str:
        return f"{self.heads} heads"


def named_attention(module: nn.Module) -> dict[str, Attention]:
    """The attention layers within a module by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Attention)}


def default_source(kernel: Kernel) -> KVSource:
    """The source for self-attention; if the mask evicts tokens, it caches only those that can still be visible."""
    cache_mask = kernel.cache_mask
    if cache_mask is None or kernel.recurrent or not can_evict(cache_mask):
        return SelfSource()
    return WindowSource(cache_mask)


def split_heads(x: Float[Tensor, "b l he"], heads: int) -> Float[Tensor, "b h l e"]:
    """The channels of `x` split into `heads` contiguous groups, with the head axis before the sequence axis."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _repeat_heads(x: Float[Tensor, "b n l e"], heads: int) -> Float[Tensor, "b h l e"]:
    """Each head as often as needed for `heads` of them; adjacent ones share."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def check_position(position: Position, kernel: Kernel) -> None:
    """Raise ValueError for a position encoding that this kernel cannot apply."""
    conflict = f"{type(kernel).__name__} does not support"
    encoding = type(position).__name__
    if missing := position.required_seams() - {"embed"} - kernel.supports:
        raise ValueError(f"{conflict} {sorted(missing)}, which {encoding} needs")
    if position.uses_positive_scores and kernel.scores_at_most_zero:
        raise ValueError(f"{conflict} {encoding}, which drops scores below 0: no score of this kernel is above 0")
    if position.needs_every_key and kernel.cache_mask != Causal():
        reason = f"which compares a query with every earlier token: only a softmax with the mask {Causal()!r} does"
        raise ValueError(f"{conflict} {encoding}, {reason}")


def check_tied_kernel(kernel: Kernel, kv_heads: int, heads: int, *, uses_own_source: bool) -> None:
    """Raise ValueError for a kernel whose queries are its keys where there are other keys, or fewer of them."""
    if kernel.tied_qk and (not uses_own_source or kv_heads != heads):
        raise ValueError(
            f"{type(kernel).__name__} uses keys as queries, so it needs self-attention (no source) with as many "
            f"kv_heads ({kv_heads}) as heads ({heads})"
        )


def check_key_heads(kernel: Kernel, key_heads: int, kv_heads: int, heads: int) -> None:
    """Raise ValueError for numbers of heads of queries and keys that `heads` of values cannot share."""
    if key_heads == kv_heads:
        return
    if kv_heads != heads or key_heads < 1 or heads % key_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of key_heads ({key_heads}), without kv_heads")
    if kernel.tied_qk or kernel.extra_query_dim:
        raise ValueError(f"{type(kernel).__name__} needs as many key_heads ({key_heads}) as heads ({heads})")


def check_convolved_kernel(kernel: Kernel, *, uses_own_source: bool) -> None:
    """Raise ValueError for a kernel whose queries, keys and values cannot be convolved together."""
    if kernel.tied_qk or not uses_own_source:
        raise ValueError("a short convolution mixes queries and keys of the same tokens: it needs self-attention")
    if kernel.gate_dim and kernel.gate_projection is None:
        raise ValueError(f"the gates of {type(kernel).__name__} must not be convolved: it needs a gate_projection")


def set_attention_dropout(model: nn.Module, probability: float) -> None:
    """Drop each softmax weight of a model with this probability in training.

    Raises UserError for a model without softmax kernels, or with a kernel that forms no such weights."""
    if not probability:
        return
    kernels = named_kernels(model)
    softmax_kernels = [kernel for kernel in kernels.values() if kernel.drop_weights(probability)]
    for name, kernel in kernels.items():
        if kernel.has_other_weights or not any(part in softmax_kernels for part in named_kernels(kernel).values()):
            raise UserError(
                f"attention_dropout ({probability}) acts on the weights of softmax kernels, and {name} is a "
                f"{type(kernel).__name__}; leave it at 0, dropout acts on the outputs of all attention"
            )
    if not softmax_kernels:
        raise UserError(f"attention_dropout ({probability}) must be 0: the model has no softmax kernels")
