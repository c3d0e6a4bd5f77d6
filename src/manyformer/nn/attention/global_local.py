"""Attention with separate projections for global tokens (Longformer, ETC)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.attention.attention import MultiHeadLayer, split_heads
from manyformer.nn.core import (
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
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import AllKeys, AttendsToAll, Mask, NotMask, TokenSet, VisibleToAll, WithRole
from manyformer.nn.masks.mask import simplify_and, take_tokens
from manyformer.nn.ops.static_layout import layout_is_complete, materialize
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.head_selection import (
    HeadSelection,
    select_head_inputs,
    select_head_outputs,
    select_head_pairs,
)
from manyformer.nn.runtime.torch_internals import is_plain, is_traced
from manyformer.nn.runtime.training_hooks import FusedRows
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel


@final
class GlobalLocalAttention(MultiHeadLayer, FusedRows):
    """Longformer's attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    Tokens attend by `local_mask`, and to global tokens, with one set of projections; global tokens attend to all keys
    with a second set, initialized as a copy of the first. Both share the output projection. If there are few global
    tokens, the second set is computed for them alone. It is bidirectional, so it has no decoding state.
    """

    def __init__(self, dim: int, heads: int, local_mask: Mask, tokens: TokenSet, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.kv_proj = nn.Linear(dim, 2 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.global_q_proj = nn.Linear(dim, dim)
        self.global_kv_proj = nn.Linear(dim, 2 * dim)
        self.tokens = tokens
        # each query has visible keys in one of the two kernels, and gets zeros from the other
        local_queries = (local_mask | VisibleToAll(tokens)) & NotMask(AttendsToAll(tokens))
        self.local_kernel = SoftmaxKernel(local_queries, dropout=dropout)
        self.global_kernel = SoftmaxKernel(AttendsToAll(tokens), dropout=dropout, scale=(dim // heads) ** -0.5)
        self.reset_parameters()

    def select_projections(self, selection: HeadSelection) -> None:
        for q_proj, kv_proj in ((self.q_proj, self.kv_proj), (self.global_q_proj, self.global_kv_proj)):
            select_head_outputs(q_proj, selection)
            select_head_pairs(kv_proj, selection)
        select_head_inputs(self.out_proj, selection)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return _halves(self, ("kv_proj", "global_kv_proj"))

    def reset_parameters(self) -> None:
        """Initialize with Glorot's uniform distribution; the global projections are copies of the local ones."""
        # keys and values are two matrices in one, each with a limit of its own
        for weight in (self.q_proj.weight, *self.kv_proj.weight.data.chunk(2), self.out_proj.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.zeros_(layer.bias)
        self.copy_projections()

    def copy_projections(self) -> None:
        """Copy the local projections to the global ones."""
        self.global_q_proj.load_state_dict(self.q_proj.state_dict())
        self.global_kv_proj.load_state_dict(self.kv_proj.state_dict())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("GlobalLocalAttention is bidirectional: it cannot continue from a state")
        q = self.q_proj(x)
        k, v = self.kv_proj(x).chunk(2, dim=-1)
        q, k, v = (split_heads(projected, self.heads) for projected in (q, k, v))
        y = self.local_kernel(KernelCall(q, k, v, ctx.positions, ctx.positions, NoPosition(), None, ctx.watch)).y
        # a sum of two attentions, since each query has zeros from the one that is not its own
        y = y + self._global_outputs(x, ctx)
        return LayerOutput(self.out_proj(self.merge_heads(y)), state)

    def _global_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> Float[Tensor, "b h l e"]:
        """The attention outputs of global tokens, and zeros for all others."""
        # watchers are given the weights of all queries, as the definition has them
        indices = None
        if ctx.watch is no_watch:
            indices = self._global_indices(ctx.positions)
        queries_in = x
        query_positions = ctx.positions
        if indices is not None:
            rows = torch.arange(len(indices), device=indices.device)[:, None]
            queries_in = x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))
            query_positions = take_tokens(ctx.positions, (rows, indices))
        q = split_heads(self.global_q_proj(queries_in), self.heads)
        # with more queries of all heads than the stream has channels, it is cheaper to project every token
        is_cheaper = indices is None or indices.shape[1] * self.heads > x.shape[-1]
        if is_cheaper or not is_plain(self.global_kv_proj, nn.Linear):
            k, v = (split_heads(projected, self.heads) for projected in self.global_kv_proj(x).chunk(2, dim=-1))
            call = KernelCall(q, k, v, query_positions, ctx.positions, NoPosition(), None, ctx.watch)
            y = self.global_kernel(call).y
        else:
            y = self._attend_without_projection(q, x, query_positions, ctx.positions)
        if indices is None:
            return y
        columns = indices[:, None, :, None].expand_as(y)
        # added, not copied: a column that fills up adds zeros wherever it points
        outputs: Tensor = y.new_zeros(*y.shape[:2], x.shape[1], y.shape[-1]).scatter_add(2, columns, y)
        return outputs

    def _attend_without_projection(
        self,
        q: Float[Tensor, "b h g e"],
        x: Float[Tensor, "b l d"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h g e"]:
        """Global attention without keys and values of all tokens.

        q (W x) equals (q W) x, and a bias of keys is the same for all keys of a query.
        """
        # (h, e, d): the matrices of each head
        k_proj, v_proj = (weight.view(self.heads, -1, x.shape[-1]) for weight in self.global_kv_proj.weight.chunk(2))
        call = KernelCall(q @ k_proj, x[:, None], x[:, None], query_positions, key_positions, NoPosition())
        mean_inputs = self.global_kernel(call).y
        bias = self.global_kv_proj.bias.chunk(2)[1].view(self.heads, 1, -1)
        # the columns that fill up a row are other tokens, whose outputs are those of the first set
        is_global = self.tokens(query_positions) & (query_positions.segment_ids != PADDING_SEGMENT)
        y: Tensor = (mean_inputs @ v_proj.mT + bias) * is_global[:, None, :, None]
        return y

    def _global_indices(self, positions: TokenPositions) -> Int[Tensor, "b g"] | None:
        """The columns of the global tokens of each row, padded with other tokens; None if they cannot be computed."""
        layout = positions.layout
        batch, length = positions.position_ids.shape
        if is_traced():
            return None
        if isinstance(layout, ContiguousLayout | PrefixedLayout) and layout_is_complete(positions):
            return _layout_indices(self.tokens, layout, length, positions.position_ids.device).expand(batch, -1)
        # a GPU would have to be waited for, in each layer, to learn how many there are
        if is_readable(positions.position_ids):
            return _find_indices(self.tokens, positions)
        return None


@lru_cache(maxsize=64)
def _layout_indices(
    tokens: TokenSet, layout: ContiguousLayout | PrefixedLayout, length: int, device: torch.device
) -> Int[Tensor, "1 g"]:
    # outside inference mode, whose tensors could not be used in training later
    with torch.inference_mode(mode=False):
        return _find_indices(tokens, materialize(layout, length, torch.device("cpu"))).to(device)


def _find_indices(tokens: TokenSet, positions: TokenPositions) -> Int[Tensor, "b g"]:
    """The columns of the tokens of a set in each row, padded with others to the most of a row, and to at least one."""
    is_chosen = tokens(positions) & (positions.segment_ids != PADDING_SEGMENT)
    # at least one, so that all weights get a gradient
    max_count = max(int(is_chosen.sum(-1).max()), 1)
    return is_chosen.byte().argsort(dim=-1, descending=True, stable=True)[:, :max_count]


def _halves(owner: nn.Module, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The rows of keys, and as many of values, in the matrices of these children that are still linear layers."""
    linears = {name: child for name in names if isinstance(child := getattr(owner, name), nn.Linear)}
    return {f"{name}.weight": (linear.out_features // 2,) * 2 for name, linear in linears.items()}


@final
class SideProjections(nn.Module, FusedRows):
    """The projections for queries of one side (summaries or text): queries, outputs, keys and values of either side."""

    def __init__(self, dim: int, mask: Mask, position: Position) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.summary_kv_proj = nn.Linear(dim, 2 * dim)
        self.text_kv_proj = nn.Linear(dim, 2 * dim)
        self.kernel = SoftmaxKernel(mask)
        self.position = position
        for layer in (self.q_proj, self.out_proj, self.summary_kv_proj, self.text_kv_proj):
            nn.init.zeros_(layer.bias)
            for weight in torch.split(layer.weight.data, dim):
                nn.init.xavier_uniform_(weight)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return _halves(self, ("summary_kv_proj", "text_kv_proj"))


@final
class FourPieceAttention(MultiHeadLayer):
    """ETC's attention without shared projections (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on global-local attention. Summaries see each other, and the text by `g2l`; tokens of the text see the
    summaries, and each other by `l2l`. Each of the four pieces has its own keys and values, each side its own queries,
    outputs and positions; a query's two pieces share one softmax. Must be inside a `SummaryPrefixedLayer`."""

    def __init__(self, dim: int, heads: int, *, g2l: Mask, l2l: Mask, position: Callable[[], Position]) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        from_summaries, to_summaries = AttendsToAll(WithRole(SUMMARY_ROLE)), VisibleToAll(WithRole(SUMMARY_ROLE))
        # queries of one side see nothing by the mask of the other, so that the two kernels can be added
        summary_mask = from_summaries if g2l == AllKeys() else simplify_and(from_summaries, to_summaries | g2l)
        text_mask = simplify_and(simplify_and(l2l, NotMask(to_summaries)) | to_summaries, NotMask(from_summaries))
        self.summaries = SideProjections(dim, summary_mask, position())
        self.text = SideProjections(dim, text_mask, position())

    def select_projections(self, selection: HeadSelection) -> None:
        for side in (self.summaries, self.text):
            select_head_outputs(side.q_proj, selection)
            select_head_pairs(side.summary_kv_proj, selection)
            select_head_pairs(side.text_kv_proj, selection)
            select_head_inputs(side.out_proj, selection)

    def output_projections(self) -> Sequence[nn.Linear]:
        return (self.summaries.out_proj, self.text.out_proj)

    def without_heads(self) -> Layer:
        raise ValueError("summaries and text have output biases of their own, so one head must remain")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        positions = ctx.positions
        if not isinstance(positions.layout, PrefixedLayout):
            raise ValueError("FourPieceAttention needs summaries before the text: wrap it in a SummaryPrefixedLayer")
        parts = x.tensor_split([positions.layout.prefix], 1)
        sides = (self.summaries, self.text)
        # every token has the queries of its own side, for both kernels
        q = torch.cat([side.q_proj(part) for side, part in zip(sides, parts)], 1)
        y = torch.zeros((), dtype=x.dtype, device=x.device)
        for side in sides:
            # queries of the other side have no visible keys and get zeros
            k, v = torch.cat([side.summary_kv_proj(parts[0]), side.text_kv_proj(parts[1])], 1).chunk(2, dim=-1)
            q_heads, k, v = (split_heads(projected, self.heads) for projected in (q, k, v))
            y = y + side.kernel(KernelCall(q_heads, k, v, positions, positions, side.position, None, ctx.watch)).y
        outs = self.merge_heads(y).tensor_split([positions.layout.prefix], 1)
        return LayerOutput(torch.cat([side.out_proj(output) for side, output in zip(sides, outs)], 1), state)
