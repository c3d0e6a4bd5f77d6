"""Attention whose heads share the query and key projections, each with its own weights of the shared dimensions."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.attention.attention import Attention, AttentionState, MultiHeadLayer, default_source, split_heads
from manyformer.nn.attention.head_gates import attention_heads
from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, HaltedTokenSource, KVShape, KVSource
from manyformer.nn.core import Context, LayerOutput, State, TokenPositions
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import Mask
from manyformer.nn.positions.position import NoPosition
from manyformer.nn.runtime.head_selection import (
    HeadSelection,
    select_entries,
    select_head_inputs,
    select_head_outputs,
    select_outputs,
)
from manyformer.nn.runtime.training_hooks import OptimizerHints
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel


@final
class CollaborativeAttention(MultiHeadLayer, OptimizerHints):
    """Collaborative multi-head attention (Cordonnier et al. 2020, arXiv:2006.16362, section 3).

    In head h the score of query x and key y is (m_h * (W_Q x)).(W_K y) + c_h.y over sqrt(shared / heads). W_Q and W_K,
    of width `shared`, serve all heads, and `mixing` holds the m_h: with `shared` = dim and m_h equal to 1 in dimensions
    of head h and 0 elsewhere it is ordinary attention. `key_bias` holds the c_h, which replace biases of queries;
    biases of keys would be the same for all keys of a query. Values are as in `Attention`. The cache holds one key for
    all heads, and the values. Positions must be in the stream. Raises ValueError for invalid widths.
    """

    # the bias of each head is a linear layer
    adamw_weights = ("key_bias.weight",)

    def __init__(
        self, dim: int, heads: int, mask: Mask | None = None, *, shared: int, source: KVSource | None = None
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        if shared < 1:
            raise ValueError(f"shared ({shared}) must be at least 1 dimension")
        self.heads = heads
        self.shared = shared
        self.value_dim = dim // heads
        self.kernel = SoftmaxKernel(mask, scale=(heads / shared) ** 0.5)
        if source is None:
            self.source = default_source(self.kernel)
        else:
            self.source = source
        self.position = NoPosition()
        self.key_origin = self.source.key_origin
        self.q_proj = nn.Linear(dim, shared, bias=False)
        self.k_proj = nn.Linear(dim, shared, bias=False)
        self.key_bias = nn.Linear(dim, heads, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.mixing = nn.Parameter(torch.empty(heads, shared))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections with Glorot's uniform distribution, `mixing` from N(0, 0.2^2) as the authors do."""
        init_glorot(self.q_proj, self.k_proj, self.key_bias, self.v_proj, self.out_proj)
        nn.init.normal_(self.mixing, std=0.2)

    def copy_values(self, layer: Attention) -> None:
        """Take the weights of values and of the output of a layer of the same width."""
        for projection, weight, bias in (
            (self.v_proj, layer.kv_proj.weight[-layer.out_proj.in_features :], layer.kv_proj.bias),
            (self.out_proj, layer.out_proj.weight, layer.out_proj.bias),
        ):
            projection.weight.copy_(weight)
            projection.bias.copy_(torch.zeros_like(projection.bias) if bias is None else bias[-len(weight) :])

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        # the biases c_h y of all heads are further channels of the one key
        shape = KVShape(1, self.shared + self.heads, self.heads * self.value_dim)
        source_state = self.source.init_state(CacheSpec(batch, shape, capacity, device, dtype))
        return AttentionState(source_state, self.kernel.init_state(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is None:
            attention_state = AttentionState(None, None)
        else:
            attention_state = state
        keys = self.source(x, ctx, self._project, attention_state.source)
        v = split_heads(keys.v[:, 0], self.heads)
        # a view: the one key of a token serves all heads
        k = keys.k.expand(-1, self.heads, -1, -1)
        q = self._queries(x)
        y = self.kernel(
            KernelCall(q, k, v, ctx.positions, keys.positions, self.position, attention_state.kernel, ctx.watch)
        ).y
        y = self.out_proj(self.merge_heads(y))
        return LayerOutput(y, None if state is None else AttentionState(keys.state, attention_state.kernel), keys.loss)

    def select_projections(self, selection: HeadSelection) -> None:
        select_outputs(self.key_bias, selection.heads)
        select_head_outputs(self.v_proj, selection)
        select_head_inputs(self.out_proj, selection)
        select_entries(self, "mixing", selection.heads, 0)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, shared={self.shared}"

    def _queries(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l e"]:
        """The mixed queries, followed by a one-hot vector of the head that selects the head's key bias."""
        mixed = self.q_proj(x)[:, None] * self.mixing[:, None]
        head_indicator = torch.eye(self.heads, dtype=mixed.dtype, device=x.device)[:, None]
        return torch.cat([mixed, head_indicator.expand(x.shape[0], -1, x.shape[1], -1)], dim=-1)

    def _project(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return torch.cat([self.k_proj(x), self.key_bias(x)], dim=-1)[:, None], self.v_proj(x)[:, None]


def share_query_key_dims(model: nn.Module, shared: int) -> None:
    """Replace the attention of each layer of `model`, in place, by one whose heads share so many dimensions.

    Values and output projections keep their weights, queries and keys get new ones. Raises UserError for a model with
    other layers with heads than softmax attention without positions in its scores."""
    layers = attention_heads(model)
    if not layers:
        raise UserError(f"shared_qk_dim ({shared}) must be null: no layer of this model has heads")
    replacements: dict[nn.Module, CollaborativeAttention] = {}
    for name, layer in layers.items():
        try:
            replacements[layer] = _with_shared_dims(layer, shared)
        except ValueError as error:
            raise UserError(
                f"shared_qk_dim ({shared}) must be null: the heads of {name} cannot share dimensions, {error}"
            ) from None
    # in all places of a layer, which may be applied several times
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])


def _with_shared_dims(layer: MultiHeadLayer, shared: int) -> CollaborativeAttention:
    """A layer with the mask, the source, the values and the output of `layer`.

    Raises ValueError, with the reason, where heads cannot share the dimensions of queries and keys."""
    if not isinstance(layer, Attention):
        raise ValueError(f"it is a {type(layer).__name__}")
    kernel = layer.kernel
    dim = layer.kv_proj.in_features
    heads, _, value_dim = layer.kv_shape
    if not isinstance(kernel, SoftmaxKernel):
        raise ValueError(f"its kernel is {type(kernel).__name__}, which is no softmax of products")
    if layer.position.required_seams() - {"embed"}:
        name = type(layer.position).__name__
        raise ValueError(f"{name} acts on queries, keys or scores, and positions must be in the stream")
    if isinstance(layer.source, HaltedTokenSource):
        raise ValueError("its keys are those of halted tokens, too")
    if layer.value_stages is not None or layer.short_convolution is not None or layer.output_stage is not None:
        raise ValueError("stages or a convolution change its queries, keys, values or outputs")
    if heads != layer.heads or layer.pre_norm is not None:
        raise ValueError("it shares its keys among heads, or normalizes its own inputs, already")
    if not dim == layer.out_proj.out_features == heads * value_dim:
        raise ValueError("its values are not as wide as its inputs and outputs")
    target = CollaborativeAttention(dim, layer.heads, kernel.mask, shared=shared, source=layer.source)
    with torch.no_grad():
        # keys come before values in the rows of the matrix that projects both
        target.copy_values(layer)
    return target
