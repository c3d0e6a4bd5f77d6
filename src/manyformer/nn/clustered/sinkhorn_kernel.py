"""Sinkhorn attention: each block sees itself and a mixture of blocks from a learned sorting.

A sorting network scores blocks for positions (Tay et al. 2020, arXiv:2002.11296, section 3.2).
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.clustered import sinkhorn_attention as ops
from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, State, TokenPositions
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Causal
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.ops.document_rows import DocumentGrid, grid_by_run
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled, is_of_any_size, narrowed
from manyformer.nn.runtime.training_hooks import UndecayedParameters


class SortingNetwork(PerHeadTensors, ABC):
    """Scores (n, h, b, b) of all key blocks for the slot of each query block; keys of absent tokens must be zeros.

    If `causal`, the scores of a slot depend only on the keys up to the first token of its block, and the scores of its
    own and of later blocks are undefined.
    """

    def __init__(self, heads: int, key_dim: int, *, causal: bool) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("key", key_dim)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.causal = causal

    @abstractmethod
    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]: ...

    def describe_slots(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None
    ) -> Float[Tensor, "n h b i"]:
        """The input features of each slot: its mean key; if causal, the mean of all keys so far, and its first key."""
        if not self.causal:
            return block_means(k, present)
        # a causal slot is described by what its first token knows: all earlier tokens and itself
        first_keys = k[:, :, :, 0]
        # the own block is left out of the sum; adding and subtracting it would leak its later tokens by rounding
        earlier_sum = F.pad(k[:, :, :-1].sum(3).cumsum(2), (0, 0, 1, 0))
        num_earlier = torch.arange(k.shape[2], device=k.device)[:, None] * k.shape[3]
        return torch.cat([(earlier_sum + first_keys) / (num_earlier + 1), first_keys], dim=-1)


@final
class MLPSorting(SortingNetwork, UndecayedParameters):
    """W2 relu(W1 x + b1) with separate weights for each head, for up to `max_blocks` blocks (section 3.2, equation 2).

    x is a mean where the paper has a sum, so that it does not grow with the block. W2 has no bias: Sinkhorn
    normalization removes a constant of a column. Raises ValueError for more blocks.
    """

    undecayed = ("shift",)

    head_axes = (("up", -3), ("shift", -3), ("down", -3))

    def __init__(self, heads: int, key_dim: int, max_blocks: int, *, causal: bool, ff_dim: int | None = None) -> None:
        super().__init__(heads, key_dim, causal=causal)
        if max_blocks < 1:
            raise ValueError(f"MLPSorting: max_blocks ({max_blocks}) must be at least 1")
        input_dim = key_dim * (2 if causal else 1)
        ff_dim = 2 * key_dim if ff_dim is None else ff_dim
        self.up = _init_head_matrices(heads, input_dim, ff_dim)
        self.shift = nn.Parameter(torch.zeros(heads, 1, ff_dim))
        self.down = _init_head_matrices(heads, ff_dim, max_blocks)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        blocks = k.shape[2]
        max_blocks = self.down.shape[2]
        if blocks > max_blocks:
            raise ValueError(f"MLPSorting was built for max_blocks={max_blocks}, got {blocks} blocks")
        hidden = (self.describe_slots(k, present) @ self.up.to(k.dtype) + self.shift.to(k.dtype)).relu()
        return hidden @ self.down[:, :, :blocks].to(k.dtype)


@final
class BilinearSorting(SortingNetwork):
    """Scaled dot products of projected slot features and projected block means, for any number of blocks.

    A variant from released packages, which use queries and keys; this one uses keys alone, because those are cached
    during decoding.
    """

    head_axes = (("slot", -3), ("block", -3))

    def __init__(self, heads: int, key_dim: int, *, causal: bool) -> None:
        super().__init__(heads, key_dim, causal=causal)
        self.slot = _init_head_matrices(heads, key_dim * (2 if causal else 1), key_dim)
        self.block = _init_head_matrices(heads, key_dim, key_dim)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        slots = self.describe_slots(k, present) @ self.slot.to(k.dtype)
        blocks = block_means(k, present) @ self.block.to(k.dtype)
        return slots @ blocks.mT / math.sqrt(k.shape[-1])


def block_means(k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None) -> Float[Tensor, "n h b e"]:
    """The mean key of each block; zeros for a block without tokens."""
    if present is None:
        return k.mean(3)
    return k.sum(3) / present.sum(-1).clamp(min=1)[:, None, :, None].to(k.dtype)


def _init_head_matrices(heads: int, rows: int, columns: int) -> nn.Parameter:
    """One matrix for each head, with Glorot uniform initialization."""
    weight = torch.empty(heads, rows, columns)
    for head_weight in weight:
        nn.init.xavier_uniform_(head_weight)
    return nn.Parameter(weight)


class DocumentBlocks(NamedTuple):
    """Documents divided into blocks: keys and values of all blocks, queries from block `first_query_block` on.

    `present` marks the tokens that exist, None where padding needs no mask; `grid` is None where rows are documents.
    """

    q: Float[Tensor, "n h m c e"]
    k: Float[Tensor, "n h b c e"]
    v: Float[Tensor, "n h b c f"]
    present: Bool[Tensor, "n b c"] | None
    first_query_block: int
    grid: DocumentGrid | None


@final
class SinkhornKernel(Kernel):
    """Softmax over a token's own block of `block` tokens and a sorted block (Tay et al. 2020, arXiv:2002.11296).

    Section 3: `sorting` scores blocks. The scores, in training with `gumbel_noise` times Gumbel noise, are divided by
    `temperature` and normalized in `iterations` Sinkhorn iterations to the matrix that mixes keys and values block by
    block. Its rows always sum to 1; with `iterations` None only rows are normalized. With `Causal()` a block gets
    earlier blocks alone (see `manyformer.nn.clustered.sinkhorn_attention`). With `sortcut_blocks`, for `AllKeys()`
    only, every token sees that many of the first sorted blocks and nothing else (SortCut). Blocks are counted from the
    beginning of each document. Raises ValueError for unsupported combinations."""

    supports = frozenset({"query", "key"})

    def __init__(
        self,
        sorting: SortingNetwork,
        block: int,
        mask: Mask | None = None,
        *,
        temperature: float = 0.75,
        iterations: int | None = 8,
        gumbel_noise: float = 1.0,
        sortcut_blocks: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        mask = AllKeys() if mask is None else mask
        if mask not in (Causal(), AllKeys()):
            raise ValueError(f"SinkhornKernel mixes whole blocks: mask {mask!r} must be Causal(), AllKeys() or None")
        self.causal = mask == Causal()
        if sorting.causal != self.causal:
            needed = "causal=True" if self.causal else "causal=False"
            raise ValueError(f"SinkhornKernel with mask {mask!r} needs a sorting network with {needed}")
        if self.causal and sortcut_blocks is not None:
            raise ValueError(
                "SinkhornKernel: with sortcut_blocks all tokens see the same blocks, so the mask must not be Causal()"
            )
        for name, value in (("block", block), ("iterations", iterations), ("sortcut_blocks", sortcut_blocks)):
            if value is not None and value < 1:
                raise ValueError(f"SinkhornKernel: {name} ({value}) must be at least 1")
        if not temperature > 0 or gumbel_noise < 0:
            raise ValueError(
                f"SinkhornKernel: temperature ({temperature}) must be above 0, gumbel_noise ({gumbel_noise}) at least 0"
            )
        self.sorting = sorting
        self.block = block
        self.temperature = temperature
        self.iterations = iterations or 0
        self.gumbel_noise = gumbel_noise
        self.sortcut_blocks = sortcut_blocks
        self.scale = scale

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        if not self.causal:
            raise ValueError(
                "SinkhornKernel without Causal() sorts whole sequences, so it cannot continue from a state"
            )
        return ()

    def forward(self, call: KernelCall) -> LayerOutput:
        q = call.q
        k = call.k
        v = call.v
        if not self.causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                "SinkhornKernel without Causal() needs as many keys as queries: for cross-attention use SoftmaxKernel"
            )
        k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if isinstance(call.key_positions.layout, ContiguousLayout):
            blocks = self._split_contiguous(q, k, v)
        else:
            blocks = self._split_documents(q, k, v, call.key_positions)
        sort_matrix = self._sort_matrix(blocks, v.dtype)
        call.watch(self, "sort", sort_matrix)
        if self.scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        else:
            scale = self.scale
        if self.sortcut_blocks is not None:
            sort_matrix = sort_matrix[:, :, : self.sortcut_blocks]
            y = ops.sortcut_attention(*blocks[:3], sort_matrix, scale=scale, present=blocks.present)
        else:
            sort_matrix = sort_matrix[:, :, blocks.first_query_block :]
            present = blocks.present
            y = ops.sinkhorn_attention(*blocks[:3], sort_matrix, causal=self.causal, scale=scale, present=present)
        return LayerOutput(self._collect_outputs(y, blocks, q.shape[2], k.shape[2]), call.state)

    def explain(self, call: KernelCall) -> str:
        visible = "itself and a sorted block"
        if self.sortcut_blocks:
            visible = f"{self.sortcut_blocks} sorted blocks"
        return f"blocks: each block of {self.block} tokens sees {visible}, {call.k.shape[2]} tokens in each row"

    def extra_repr(self) -> str:
        causal = "Causal()" if self.causal else "AllKeys()"
        options = f"iterations={self.iterations}, sortcut_blocks={self.sortcut_blocks}"
        return f"{self.block}, {causal}, temperature={self.temperature}, {options}"

    def _sort_matrix(self, blocks: DocumentBlocks, dtype: torch.dtype) -> Float[Tensor, "n h b b"]:
        """The matrix that mixes blocks."""
        compute_dtype = torch.promote_types(dtype, torch.float32)
        with autocast_disabled(blocks.k.device):
            logits = self.sorting(blocks.k.to(compute_dtype), blocks.present)
            if self.training and self.gumbel_noise:
                logits = logits + self.gumbel_noise * ops.gumbel(logits)
            valid = None
            if blocks.present is not None:
                has_tokens = blocks.present.any(-1)
                # empty blocks neither give nor get anything
                valid = (has_tokens[:, :, None] & has_tokens[:, None])[:, None]
            return ops.balance(logits / self.temperature, steps=self.iterations, causal=self.causal, valid=valid)

    def _split_contiguous(self, q: Tensor, k: Tensor, v: Tensor) -> DocumentBlocks:
        length = k.shape[2]
        size = self.block
        first_block = (length - q.shape[2]) // size
        # from the number of blocks, so that exported graphs are for lengths of any remainder
        blocks = -(-length // size)
        padding = blocks * size - length
        may_pad = is_of_any_size(length) or padding > 0
        # cached keys may end inside a block: queries begin at the same place of it
        query_padding = length - q.shape[2] - first_block * size
        k, v = (F.pad(x, (0, 0, 0, padding)) if may_pad else x for x in (k, v))
        if may_pad or query_padding:
            q = F.pad(q, (0, 0, query_padding, padding))
        present = None
        if may_pad and not self.causal:
            is_token = torch.arange(blocks * size, device=k.device) < length
            present = is_token.view(1, blocks, size).expand(k.shape[0], -1, -1)
        q, k, v = (_split_blocks(x, size) for x in (q, k, v))
        return DocumentBlocks(q, k, v, present, first_block, None)

    def _split_documents(self, q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions) -> DocumentBlocks:
        documents = grid_by_run(key_positions)
        size = self.block
        columns = documents.present.shape[1]
        padding = -columns % size
        blocks = [_split_blocks(F.pad(documents.scatter(x), (0, 0, 0, padding)), size) for x in (q, k, v)]
        first_block = 0
        if q.shape[2] < k.shape[2]:
            new_tokens = key_positions.columns(k.shape[2] - q.shape[2], k.shape[2])
            is_padding = new_tokens.segment_ids == PADDING_SEGMENT
            # the earliest block that a new token of any row is in
            first_block = int(torch.where(is_padding, columns - 1, new_tokens.position_ids).min()) // size
        present = None
        # absent tokens come after everything that a causal block sees
        if not self.causal:
            present = F.pad(documents.present > 0, (0, padding)).view(len(documents.present), -1, size)
        return DocumentBlocks(blocks[0][:, :, first_block:], blocks[1], blocks[2], present, first_block, documents)

    def _collect_outputs(
        self, y: Float[Tensor, "n h m c f"], blocks: DocumentBlocks, queries: int, keys: int
    ) -> Tensor:
        """Collect the outputs in the order of the queries."""
        start = blocks.first_query_block * self.block
        y = y.flatten(2, 3)
        if blocks.grid is None:
            return narrowed(y, 2, keys - queries - start, queries)
        y = F.pad(y, (0, 0, start, 0))[:, :, : blocks.grid.present.shape[1]]
        return blocks.grid.gather(y, queries)


def _split_blocks(x: Float[Tensor, "n h l e"], size: int) -> Float[Tensor, "n h b c e"]:
    return x.view(*x.shape[:2], x.shape[2] // size, size, x.shape[-1])
