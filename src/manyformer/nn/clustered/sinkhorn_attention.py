"""Blocks sorted by a matrix, and attention to them (Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296).

Each block attends to few keys, but there are many: on a CPU scores are written to memory that stays in its caches,
some rows of a head at a time, and weights are saved for the gradient where they are few (see `tile_softmax`). Tokens
are read and written in the layout of the projections.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.ops import tile_softmax
from manyformer.nn.ops.softmax_attention import torch_attention
from manyformer.nn.ops.tile_softmax import MAX_SAVED_WEIGHTS, OutputGradient, TileCall
from manyformer.nn.runtime.device_reads import ScratchBuffer
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, hides_values
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled

PAIRS_PER_THREAD = 1 << 17
"""Token pairs per thread and call: as many as fit its caches."""

MASK_BIAS = -1e30
"""Finite stand-in for -inf: -inf minus -inf is nan."""

MIN_SHARE = 1e-9
"""A slot whose total share of keys is below this is empty."""


def balance(
    logits: Float[Tensor, "*b n n"], *, steps: int, causal: bool, valid: Bool[Tensor, "*#b n n"] | None = None
) -> Float[Tensor, "*b n n"]:
    """Sinkhorn normalization of exp(logits): rows sum to 1 and, with many steps, columns too (section 3.1).

    Entries that are not `valid` are 0, and so are rows without a valid one. `causal`: a row has weight on earlier
    blocks alone, and for each row a column is scaled by its sum down to that row, so that later rows have no influence
    (section 3.3). At the fixed point each row would then put all weight on the previous block: 1 over its weight on
    others grows by 2 with every step, where there are two. With 0 steps it is a softmax over rows.
    """
    if causal:
        earlier = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(-1)
        valid = earlier if valid is None else valid & earlier

    def mask_invalid(x: Tensor) -> Tensor:
        if valid is None:
            return x
        return x.masked_fill(~valid, MASK_BIAS)

    # in logarithms: products of many normalizations would vanish
    x = mask_invalid(logits)
    x = mask_invalid(x - x.logsumexp(-1, keepdim=True))
    for _ in range(steps):
        x = mask_invalid(x - (x.logcumsumexp(-2) if causal else x.logsumexp(-2, keepdim=True)))
        x = mask_invalid(x - x.logsumexp(-1, keepdim=True))
    return x.exp()


def gumbel(x: Tensor) -> Tensor:
    """Gumbel noise: the argmax of logits plus noise is a sample of their softmax (Gumbel 1954)."""
    return -torch.empty_like(x).exponential_().log()


def sinkhorn_attention(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """Attention of each query block to its own block and to the block that `sort` mixes for it.

    Queries may be those of the last blocks only. Keys and values of absent tokens are zeros. A slot that received only
    a share of present tokens is a key with that share of the weight.
    """
    blocks = q.shape[2]
    size = q.shape[3]
    mask = None
    bias = None
    if present is None:
        # own block first, then the sorted one
        keys, values = (_pair_with_sorted(sort, x) for x in (k, v))
    else:
        keys, values, bias = _pair_with_partial(sort, k, v, present)
    if causal:
        own_mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        mask = torch.cat([own_mask, torch.ones_like(own_mask)], dim=1)
        if blocks == k.shape[2]:
            # the first block has no earlier block
            bias = torch.zeros(q.shape[0], 1, blocks, 2 * size, dtype=q.dtype, device=q.device)
            bias[:, :, 0, size:] = -torch.inf
    bias = None if bias is None else _blocks_as_rows(bias)
    y = small_batch_attention(
        _blocks_as_rows(q), _blocks_as_rows(keys), _blocks_as_rows(values), scale=scale, mask=mask, bias=bias
    )
    return y.view(q.shape[0], blocks, *y.shape[1:]).transpose(1, 2)


def sinkhorn_attention_reference(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "n h m c f"]:
    """The definition without absent tokens: a softmax over the sorted block and the block itself."""
    size = q.shape[3]
    ahead = k.shape[2] - q.shape[2]
    ys = []
    for block in range(q.shape[2]):
        sorted_blocks = [torch.einsum("nhb,nhbce->nhce", sort[:, :, block], x) for x in (k, v)]
        keys, values = (
            torch.cat([x, block_keys[:, :, ahead + block]], 2) for x, block_keys in zip(sorted_blocks, (k, v))
        )
        scores = q[:, :, block] @ keys.mT * scale
        if causal:
            visible = torch.ones(size, 2 * size, dtype=torch.bool, device=q.device).tril(size)
            visible[:, :size] = ahead + block > 0
            scores = scores.masked_fill(~visible, -torch.inf)
        ys.append(scores.softmax(-1) @ values)
    return torch.stack(ys, dim=2)


def sortcut_attention(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h s b"],
    *,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """SortCut: all queries attend to the first blocks of the sorted sequence alone (section 3.4)."""
    bias = None
    if present is None:
        keys, values = (mix_blocks(sort, x).flatten(2, 3) for x in (k, v))
    else:
        keys, values, bias = (x.flatten(2, 3) for x in mix_partial_blocks(sort, k, v, present))
        # a row without any token must have a visible key
        bias = bias.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)[:, :, None]
    y = torch_attention(q.flatten(2, 3), keys, values, attn_mask=bias, scale=scale)
    return y.view(*q.shape[:4], v.shape[-1])


def _pair_with_sorted(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m s e"]:
    """The last blocks, each concatenated with its sorted block."""
    y: Tensor = _PairWithSorted.call(sort.to(x.dtype), x)
    return y


class _PairWithSorted(HandwrittenGradient):
    """Writes blocks and sorted blocks straight to the memory that attention reads."""

    @staticmethod
    def forward(ctx: Any, sort: Tensor, x: Tensor) -> Tensor:
        rows, heads, blocks, size, width = x.shape
        queries = sort.shape[2]
        # heads first: the mixture is one batched product of (blocks, size * width) matrices
        y = x.new_empty(heads, rows, queries, 2, size, width)
        y[:, :, :, 0] = x[:, :, blocks - queries :].transpose(0, 1)
        own_blocks, sorted_blocks = y.flatten(4).flatten(0, 1).unbind(2)
        if queries == blocks:
            all_blocks = own_blocks
        else:
            all_blocks = x.transpose(0, 1).reshape(heads * rows, blocks, -1)
        weights = sort.transpose(0, 1).flatten(0, 1)
        torch.bmm(weights, all_blocks, out=sorted_blocks)
        ctx.save_for_backward(weights, all_blocks)
        return y.flatten(3, 4).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        weights, all_blocks = ctx.saved_tensors
        rows, heads, queries, pair_size, width = grad_y.shape
        grad_own, grad_sorted = grad_y.transpose(0, 1).reshape(heads * rows, queries, 2, -1).unbind(2)
        grad_sort = torch.bmm(grad_sorted, all_blocks.mT)
        grad_x = torch.bmm(weights.mT, grad_sorted)
        # the last blocks are read twice: as their own, and as parts of all mixtures
        grad_x[:, -queries:] += grad_own
        grad_sort, grad_x = (x.view(heads, rows, *x.shape[1:]).transpose(0, 1) for x in (grad_sort, grad_x))
        return grad_sort, grad_x.view(*grad_x.shape[:3], pair_size // 2, width)

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        sort, x = arguments
        return torch.cat([x[:, :, x.shape[2] - sort.shape[2] :], mix_blocks(sort, x)], 3)


def _pair_with_partial(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m s e"], Float[Tensor, "n h m s f"], Float[Tensor, "n h m s"]]:
    """Keys and values of the last blocks with their sorted blocks, and the additive bias of their scores."""
    blocks = sort.shape[2]
    # shares below 1 say that a slot holds fewer tokens than another: it gets that share of the weight
    sorted_k, sorted_v, share = mix_partial_blocks(sort, k, v, present)
    keys, values = (torch.cat([x[:, :, -blocks:], y], dim=3) for x, y in ((k, sorted_k), (v, sorted_v)))
    # a block without any token must have a visible key
    visible = present | ~present.any(-1, keepdim=True)
    mask_bias = torch.zeros_like(visible, dtype=k.dtype).masked_fill(~visible, -torch.inf)[:, None, -blocks:]
    return keys, values, torch.cat([mask_bias.expand_as(share), share], dim=-1)


def mix_blocks(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m c e"]:
    """The weighted sum of the blocks for each sorted slot."""
    return (sort.to(x.dtype) @ x.flatten(3)).view(*sort.shape[:3], *x.shape[3:])


def mix_partial_blocks(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m c e"], Float[Tensor, "n h m c f"], Float[Tensor, "n h m c"]]:
    """Keys and values of partly filled slots, and the logarithm of the filled share, which takes no gradient."""
    share = sort.to(k.dtype) @ present[:, None].to(k.dtype)
    # means over the tokens that exist: absent ones were zeros in the mixture
    filled = share[..., None].clamp(min=MIN_SHARE)
    bias = share.detach().clamp(max=1.0)
    bias = bias.log().masked_fill(bias < MIN_SHARE, -torch.inf)
    return mix_blocks(sort, k) / filled, mix_blocks(sort, v) / filled, bias


def _blocks_as_rows(x: Float[Tensor, "n h m *c"]) -> Float[Tensor, "nm h *c"]:
    """Blocks moved to the batch axis."""
    return x.transpose(1, 2).flatten(0, 1)


def small_batch_attention(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """Softmax attention; `mask` of visible keys is shared by all rows, `bias` is added to a key's scores.

    Every query must see a key. The bias takes no gradient.
    """
    if q.device.type != "cpu" or hides_values():
        return sdpa_attention(q, k, v, scale=scale, mask=mask, bias=bias)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    mask_bias = None
    if mask is not None:
        mask_bias = _mask_to_bias(mask, compute_dtype)
    bias = None if bias is None else bias.to(compute_dtype)
    y = _apply_attention(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype), mask_bias, bias, scale)
    return y.to(q.dtype)


def sdpa_attention(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """`small_batch_attention` by torch's `scaled_dot_product_attention`."""
    if mask is None:
        mask_bias = torch.zeros((), dtype=q.dtype, device=q.device)
    else:
        mask_bias = _mask_to_bias(mask, q.dtype)
    if bias is not None:
        mask_bias = mask_bias + bias.detach().to(q.dtype)[:, :, None]
    y: Tensor = torch_attention(q, k, v, attn_mask=mask_bias if mask_bias.dim() else None, scale=scale)
    return y


def small_batch_attention_reference(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"],
    bias: Float[Tensor, "r #h s"],
) -> Float[Tensor, "r h c f"]:
    """The definition."""
    scores = (q @ k.mT * scale + bias[:, :, None]).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _mask_to_bias(mask: Bool[Tensor, "c s"], dtype: torch.dtype) -> Float[Tensor, "c s"]:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@compiler_disabled
def _apply_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    y: Tensor = _SmallBatchAttention.call(q, k, v, mask, bias, scale)
    return y


class _SmallBatchAttention(HandwrittenGradient):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float
    ) -> Tensor:
        runner = _BatchRunner(q, k, v, mask, bias)
        rows, heads, queries, _ = q.shape
        y = q.new_empty(rows, queries, heads, v.shape[-1]).transpose(1, 2)
        saves_weights = any(ctx.needs_input_grad) and q.shape[:3].numel() * k.shape[2] <= MAX_SAVED_WEIGHTS
        saved: list[Tensor] = []
        with autocast_disabled(q.device):
            for row_slice, head in runner.batch_slices():
                call = runner.call(row_slice, head)
                if saves_weights:
                    tile_weights = q.new_empty(call.shape)
                else:
                    tile_weights = runner.scratch("scores", *call.shape)
                tile_softmax.compute_weights(call, scale, runner.scratch("scores", *call.shape), tile_weights)
                tile_y = runner.scratch("y", *call.shape[:2], v.shape[-1])
                y[row_slice, head] = torch.bmm(tile_weights, call.v, out=tile_y)
                if saves_weights:
                    saved.append(tile_weights)
        ctx.save_for_backward(q, k, v, y, mask, bias, *saved)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, mask, bias, *saved = ctx.saved_tensors
        if saved:
            runner = _BatchRunner(q, k, v)
        else:
            runner = _BatchRunner(q, k, v, mask, bias)
        delta = (grad_y * y).sum(-1, keepdim=True)
        saved = saved[::-1]
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        with autocast_disabled(q.device):
            for row_slice, head in runner.batch_slices():
                call = runner.call(row_slice, head)
                if saved:
                    tile_weights = saved.pop()
                else:
                    tile_weights = tile_softmax.recompute_weights(call, ctx.scale, runner.scratch)
                tile_grad_y = runner.contiguous("up", grad_y[row_slice, head])
                output_gradient = OutputGradient(tile_grad_y, delta[row_slice, head])
                tile_grads = [runner.scratch("to_q", *call.q.shape), grad_k[row_slice, head], grad_v[row_slice, head]]
                tile_softmax.compute_gradients(
                    call, tile_weights, output_gradient, runner.scratch, ctx.scale, tile_grads
                )
                grad_q[row_slice, head] = tile_grads[0]
        return grad_q, grad_k, grad_v, None, None, None


class _BatchRunner:
    """Iterates over slices of rows of one call's tensors; mask and bias are not needed where weights were saved."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.q = q
        self.k = k
        self.v = v
        self.mask = mask
        self.bias = bias
        self.scratch = ScratchBuffer(q)
        # often most rows have no bias
        if bias is None:
            self.has_bias = [False] * len(q)
        else:
            self.has_bias = (bias != 0).flatten(1).any(1).tolist()

    def batch_slices(self) -> Iterator[tuple[slice, int]]:
        """Slices of rows for each head, and the head."""
        rows, heads, queries, _ = self.q.shape
        step = max(PAIRS_PER_THREAD * torch.get_num_threads() // (queries * self.k.shape[2]), 1)
        for head in range(heads):
            for begin in range(0, rows, step):
                yield slice(begin, min(begin + step, rows)), head

    def call(self, row_slice: slice, head: int) -> TileCall:
        """The tensors of some rows of a head; valid until the next call."""
        q = self.contiguous("q", self.q[row_slice, head])
        mask_bias = None if self.mask is None else self.mask[None]
        if self.bias is not None and any(self.has_bias[row_slice]):
            bias = self.bias[row_slice, head if self.bias.shape[1] > 1 else 0, None]
            mask_bias = bias if mask_bias is None else mask_bias + bias
        return TileCall(q, self.k[row_slice, head], self.v[row_slice, head], mask_bias, None)

    def contiguous(self, name: str, x: Float[Tensor, "r c e"]) -> Float[Tensor, "r c e"]:
        """`x` in contiguous memory: products of widely strided rows take longer than copying them."""
        if x.is_contiguous():
            return x
        return self.scratch(name, *x.shape).copy_(x)
