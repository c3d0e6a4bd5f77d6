"""Mixture of Block Attention: each query attends to its own block of keys and to those whose mean it matches best."""

import math
from typing import Literal, NamedTuple, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.core import ContiguousLayout, LayerOutput, PackedLayout, StepLayout, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Causal
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.ops.chosen_attention import block_choice_attention, choose_highest_scores
from manyformer.nn.ops.document_rows import grid_by_run
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import count_blocks

MoBAPath = Literal["naive", "blocks"]


class BlockMeans(NamedTuple):
    """The mean key of each block of each document, and which block a key is in.

    `block_ids` is the block of each key among all blocks of the batch; `number` counts them in their document."""

    means: Float[Tensor, "n g e"]
    block_ids: Int[Tensor, "b s"]
    row: Int[Tensor, " n"]
    segment: Int[Tensor, " n"]
    number: Int[Tensor, " n"]
    is_complete: Bool[Tensor, " n"]


@final
class MoBAKernel(Kernel):
    """Causal softmax attention to `count` blocks of `block` keys (Lu et al. 2025, MoBA, arXiv:2502.13189, section 2.2).

    A query always sees its own block, and the `count` - 1 earlier blocks of its document whose mean key has the largest
    product with it, in each head. It has no weights, so that a model may change to full attention at any time, which it
    is where `count` blocks are all. The choice has no gradient. Rows of one document, and packed rows, are computed by
    blocks; `path` forces the definition ("naive"), which masks all pairs, as it does after cached keys. Raises
    ValueError for a count or a block below 1.
    """

    supports = frozenset({"query", "key"})
    content_based = True

    def __init__(self, block: int = 512, count: int = 3, *, path: Literal["auto"] | MoBAPath = "auto") -> None:
        super().__init__()
        if block < 1 or count < 1:
            raise ValueError(f"MoBAKernel: block ({block}) and count ({count}) must be at least 1")
        if path != "auto" and path not in get_args(MoBAPath):
            raise ValueError(f"MoBAKernel: path '{path}' does not exist; choose from auto, naive, blocks")
        self.block = block
        self.count = count
        self.path = path

    def forward(self, call: KernelCall) -> LayerOutput:
        scale = 1 / math.sqrt(call.q.shape[-1])
        if self._select_path(call) == "naive":
            mask = choose_once(lambda: self.visible(call))
            if call.watch is no_watch:
                y = ops.fused_attention(call.q, call.k, call.v, mask, causal=False, scale=scale)
                return LayerOutput(y, call.state)
            y, weights = call.softmax_reference(mask, scale=scale)
            call.watch(self, "weights", weights)
            return LayerOutput(y, call.state)
        if isinstance(call.key_positions.layout, ContiguousLayout):
            return LayerOutput(self._attend(call.q, call.k, call.v, scale), call.state)
        documents = grid_by_run(call.key_positions)
        q, k, v = (documents.scatter(x) for x in (call.q, call.k, call.v))
        y = self._attend(q, k, v, scale)
        return LayerOutput(documents.gather(y, call.q.shape[2]), call.state)

    def explain(self, call: KernelCall) -> str:
        if self._select_path(call) == "blocks":
            return f"blocks: {self.count} of {self.block} keys for each query, sorted by block"
        return "naive: " + ("forced" if self.path == "naive" else "keys are cached, watched or in rows of any layout")

    def extra_repr(self) -> str:
        return f"block={self.block}, count={self.count}, path={self.path}"

    def visible(self, call: KernelCall) -> Bool[Tensor, "b h l s"]:
        """The keys that each query sees, for tokens at any positions: the definition."""
        query_positions = call.query_positions
        key_positions = call.key_positions
        heads = call.q.shape[1]
        layout = query_positions.layout
        k = call.k.detach()
        is_step = isinstance(layout, StepLayout)
        if isinstance(layout, StepLayout):
            blocks = self._step_block_means(k, query_positions, key_positions, layout.position_limit)
        else:
            blocks = self._block_means(k, key_positions)
        means = blocks.means.repeat_interleave(heads // blocks.means.shape[1], 1)
        # blocks of the whole batch in one axis (n): which of them are of a query's document is a mask
        gates = torch.einsum("bhle,nhe->bhln", call.q.detach().to(means.dtype), means)
        query_block = (query_positions.position_ids // self.block)[..., None]
        rows = torch.arange(len(call.q), device=call.q.device)[:, None, None]
        same_document = (query_positions.segment_ids[..., None] == blocks.segment) & (blocks.row == rows)
        may_choose = same_document & blocks.is_complete & (blocks.number < query_block)
        gates = gates.masked_fill(~may_choose[:, None], -torch.inf)
        chosen = choose_highest_scores(gates, self.count - 1, may_read=not is_step)
        is_own = (same_document & (blocks.number == query_block))[:, None]
        is_chosen = is_own.expand(gates.shape) | (
            chosen[..., None] == torch.arange(gates.shape[-1], device=gates.device)
        ).any(-2)
        # (b h l n) to (b h l s): a key is seen if its block is
        by_key = is_chosen.gather(-1, blocks.block_ids[:, None, None].expand(*is_chosen.shape[:3], -1))
        return by_key & Causal().dense(query_positions, key_positions, 1)

    def _select_path(self, call: KernelCall) -> MoBAPath:
        layout = call.query_positions.layout
        key_layout = call.key_positions.layout
        are_whole = call.q.shape[2] == call.k.shape[2] and (
            layout == key_layout == ContiguousLayout() or (isinstance(layout, PackedLayout) and layout is key_layout)
        )
        if self.path == "blocks" and (call.watch is not no_watch or not are_whole):
            raise ValueError("MoBAKernel: path 'blocks' needs whole documents whose weights are not watched")
        if self.path != "naive" and are_whole and call.watch is no_watch:
            return "blocks"
        return "naive"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "b h l f"]:
        """The outputs of rows that are one document each."""
        # the choice has no gradient, and recomputation must make the same one
        chosen = choose_once(lambda: self._choose(q.detach(), k.detach()))
        return block_choice_attention(q, k, v, chosen, self.block, scale=scale)

    def _choose(self, q: Tensor, k: Tensor) -> Int[Tensor, "b h l c"]:
        """The earlier blocks of each query, -1 for none."""
        complete = k.shape[2] // self.block
        compute_dtype = torch.promote_types(k.dtype, torch.float32)
        means = k[:, :, : complete * self.block].to(compute_dtype).unflatten(2, (complete, self.block)).mean(3)  # type: ignore[no-untyped-call]
        gates = q.to(compute_dtype) @ means.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        own = torch.arange(q.shape[2], device=q.device)[:, None] // self.block
        is_later = torch.arange(complete, device=q.device) >= own
        return choose_highest_scores(gates.masked_fill(is_later, -torch.inf), self.count - 1)

    def _block_means(self, k: Float[Tensor, "b g s e"], positions: TokenPositions) -> BlockMeans:
        segments, number = (x.expand(len(k), -1) for x in (positions.segment_ids, positions.position_ids // self.block))
        row = torch.arange(len(k), device=k.device)[:, None].expand(segments.shape)
        labels = torch.stack([row, segments, number]).flatten(1)
        blocks, index, sizes = torch.unique(labels, dim=1, return_inverse=True, return_counts=True)
        keys = k.to(torch.promote_types(k.dtype, torch.float32)).transpose(1, 2).flatten(0, 1)
        sums = keys.new_zeros(len(sizes), *keys.shape[1:]).index_add(0, index, keys)
        means = sums / sizes[:, None, None]
        row_index, segment, block_number = blocks
        return BlockMeans(means, index.view(segments.shape), row_index, segment, block_number, sizes == self.block)

    def _step_block_means(
        self, k: Float[Tensor, "b g s e"], query: TokenPositions, keys: TokenPositions, position_limit: int
    ) -> BlockMeans:
        """The blocks of the document of each row's one query, as many as positions allow; the last one of a row is for
        all other keys."""
        rows = len(k)
        count = count_blocks(position_limit, self.block) + 1
        # keys of other documents, padding and unused columns go to the last block, which is never chosen
        number = torch.where(query.same_document(keys)[:, 0], keys.position_ids // self.block, count - 1)
        index = number + count * torch.arange(rows, device=k.device)[:, None]
        flat_keys = k.to(torch.promote_types(k.dtype, torch.float32)).transpose(1, 2).flatten(0, 1)
        sums = flat_keys.new_zeros(rows * count, *flat_keys.shape[1:]).index_add(0, index.flatten(), flat_keys)
        sizes = index.new_zeros(rows * count).index_add(0, index.flatten(), torch.ones_like(index).flatten())
        block = torch.arange(rows * count, device=k.device)
        row = block // count
        block_number = block % count
        means = sums / sizes.clamp(min=1)[:, None, None]
        is_complete = (sizes == self.block) & (block_number < count - 1)
        return BlockMeans(means, index, row, query.segment_ids[:, 0][row], block_number, is_complete)
