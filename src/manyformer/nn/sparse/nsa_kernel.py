"""Native Sparse Attention: compressed blocks of keys, the blocks that they choose, and a window, gated per head."""

import math
from typing import Literal, NamedTuple, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import ContiguousLayout, LayerOutput, State, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Causal, Window
from manyformer.nn.ops.chosen_attention import block_choice_attention, choice_mask, choose_highest_scores
from manyformer.nn.ops.document_rows import document_rows
from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import count_blocks
from manyformer.nn.runtime.training_hooks import UndecayedParameters
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel

NSAPath = Literal["naive", "blocks"]
MIN_BLOCKS_SEEN = 3
"""The blocks that a query always sees: the first, its own and the one before its own."""


class NSASizes(NamedTuple):
    """Lengths in tokens of compressed blocks, between their starts, of selected blocks and of the window.

    `blocks_seen` is the number of selected blocks of a query, the first, its own and the one before included."""

    compressed_length: int = 32
    stride: int = 16
    block: int = 64
    blocks_seen: int = 16
    window: int = 512

    def check(self) -> None:
        """Raise ValueError for sizes that exclude each other."""
        if min(self) < 1 or self.compressed_length % self.stride or self.block % self.stride:
            raise ValueError(
                f"NSAKernel: compressed_length ({self.compressed_length}) and block ({self.block}) must be multiples "
                f"of stride ({self.stride}), and all of them and window ({self.window}) at least 1"
            )
        if self.blocks_seen < MIN_BLOCKS_SEEN:
            raise ValueError(
                f"NSAKernel: blocks_seen ({self.blocks_seen}) must be at least {MIN_BLOCKS_SEEN}: the first block, a "
                "query's own and the one before it"
            )

    def complete_blocks(self, length: int) -> int:
        """The number of compressed blocks in so many tokens."""
        return max(0, (length - self.compressed_length) // self.stride + 1)


class CompressedBlocks(NamedTuple):
    """The compressed keys and values of all complete blocks of a row."""

    k: Float[Tensor, "b g c e"]
    v: Float[Tensor, "b g c f"]

    def append(self, new: "CompressedBlocks") -> "CompressedBlocks":
        """These blocks followed by `new` ones."""
        return CompressedBlocks(*(torch.cat([old.to(part.dtype), part], 2) for old, part in zip(self, new)))


@final
class BlockCompression(nn.Module, UndecayedParameters):
    """Maps the vectors of a block, with learned vectors of their places in it, to one: a network with a hidden layer.

    Section 3.3.1. All heads share it."""

    undecayed = ("places",)

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(length, width).normal_(std=width**-0.5))
        self.up = nn.Linear(length * width, width)
        self.down = nn.Linear(width, width)

    def forward(self, blocks: Float[Tensor, "b g c n e"]) -> Float[Tensor, "b g c e"]:
        y: Tensor = self.down(F.gelu(self.up((blocks + self.places).flatten(-2))))
        return y


@final
class NSAKernel(Kernel):
    """A gated sum of three causal attentions (Yuan et al. 2025, Native Sparse Attention, arXiv:2502.11089, section 3).

    Each branch has keys and values of its own, for which the kernel projects two further sets. The compressed branch
    attends to blocks of `compressed_length` tokens, each mapped to one key and one value, as soon as they are complete.
    What the heads that share keys give to compressed blocks ranks the blocks of the selected branch; the ranking has no
    gradient. The third branch is a window. Gates are sigmoids of channels of the queries. Compressed keys take the
    position of their block's last token; the paper says nothing of it. Blocks are counted from a document's first
    token. Rows of one document, and packed rows, are computed by blocks; `path` forces the definition ("naive"), which
    masks all pairs, as it does after cached keys. Raises ValueError for sizes that exclude each other.
    """

    supports = frozenset({"query", "key"})
    content_based = True
    couples_heads = True
    has_other_weights = True
    extra_query_dim = 3

    def __init__(
        self,
        dim: int,
        kv_heads: int,
        head_dim: int,
        sizes: NSASizes | None = None,
        *,
        path: Literal["auto"] | NSAPath = "auto",
    ) -> None:
        super().__init__()
        if path != "auto" and path not in get_args(NSAPath):
            raise ValueError(f"NSAKernel: path '{path}' does not exist; choose from auto, naive, blocks")
        self.sizes = sizes or NSASizes()
        self.path = path
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.sizes.check()
        self.gate_dim = 4 * head_dim
        self.further_keys_values = HeadProjection(dim, kv_heads, self.gate_dim)
        self.compress_keys = BlockCompression(self.sizes.compressed_length, head_dim)
        self.compress_values = BlockCompression(self.sizes.compressed_length, head_dim)
        self.window = SoftmaxKernel(Causal() & Window(self.sizes.window))

    @property
    def gate_projection(self) -> nn.Module | None:
        return self.further_keys_values

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        return CompressedBlocks(empty, empty)

    def forward(self, call: KernelCall) -> LayerOutput:
        # the layer projects three more channels of each query: the gates of the branches
        q, gates = torch.split(call.q, [self.head_dim, 3], -1)
        v, *branches = torch.split(call.v, self.head_dim, -1)
        shares = gates.sigmoid()
        window = self.window(call._replace(q=q, v=v, state=None, watch=no_watch)).y
        # the layer turned only the window's keys; those of compressed blocks are turned after compression
        branches[2] = call.position.key(branches[2], call.key_positions)
        rows = document_rows(call.query_positions, call.key_positions, q.shape[2])
        scale = 1 / math.sqrt(self.head_dim)
        q = rows.queries(q)
        keys, values, selected_keys, selected_values = [rows.keys(x) for x in branches]
        layout = call.query_positions.layout
        # blocks of a state are those of one document from its first token on
        cached = call.state if rows.is_contiguous else None
        start = 0
        if isinstance(layout, ContiguousLayout):
            start = layout.start
        blocks = self._compress(keys, values, cached, start, call.position)
        # the ranking comes for free: weights of compressed blocks are needed for their branch anyway
        weights = self._compressed_weights(q, blocks.k, rows.positions, scale)
        chosen = choose_once(lambda: self._choose(weights.detach(), rows.positions, keys.shape[2]))
        compressed = weights.to(q.dtype) @ self._by_head(blocks.v, q)
        chosen = self._by_head(chosen, q)
        if self._select_path(is_whole=rows.is_whole) == "blocks":
            selected = block_choice_attention(q, selected_keys, selected_values, chosen, self.sizes.block, scale=scale)
        else:
            visible = choice_mask(chosen, self.sizes.block, rows.positions, keys.shape[2])
            scores = q @ self._by_head(selected_keys, q).mT * scale
            selected = masked_softmax(scores, visible).to(q.dtype) @ self._by_head(selected_values, q)
        compressed = rows.gather(compressed)
        selected = rows.gather(selected)
        y = shares[..., :1] * compressed + shares[..., 1:2] * selected + shares[..., 2:] * window
        return LayerOutput(y, None if call.state is None else blocks if rows.is_contiguous else call.state)

    def explain(self, call: KernelCall) -> str:
        rows = document_rows(call.query_positions, call.key_positions, call.q.shape[2])
        if self._select_path(is_whole=rows.is_whole) == "blocks":
            return f"blocks: {self.sizes.blocks_seen} of {self.sizes.block} keys for each query, sorted by block"
        return "naive: " + ("forced" if self.path == "naive" else "keys are cached, or in rows of any layout")

    def extra_repr(self) -> str:
        return f"{self.sizes}, path={self.path}"

    def _select_path(self, *, is_whole: bool) -> NSAPath:
        if self.path == "blocks" and not is_whole:
            raise ValueError("NSAKernel: path 'blocks' needs whole documents")
        if self.path != "naive" and is_whole:
            return "blocks"
        return "naive"

    def _compress(
        self,
        k: Float[Tensor, "n g s e"],
        v: Float[Tensor, "n g s f"],
        cached: CompressedBlocks | None,
        start: int,
        position: Position,
    ) -> CompressedBlocks:
        """The complete blocks of rows of one document; `cached` are those of the first `start` tokens, if all are."""
        length, stride, *_ = self.sizes
        is_cached = cached is not None and cached.k.shape[2] == self.sizes.complete_blocks(start)
        first = 0
        if is_cached:
            first = self.sizes.complete_blocks(start)
        count = self.sizes.complete_blocks(k.shape[2])
        if first == count:
            if cached is not None and is_cached:
                return cached
            return CompressedBlocks(k[:, :, :0], v[:, :, :0])
        # overlapping blocks of `length` tokens, one every `stride`
        k, v = (x[:, :, first * stride :].unfold(2, length, stride).mT for x in (k, v))
        ends = torch.arange(first, count, device=k.device) * stride + length - 1
        positions = TokenPositions(ends.expand(k.shape[0], -1), torch.zeros_like(ends).expand(k.shape[0], -1))
        new = CompressedBlocks(position.key(self.compress_keys(k), positions), self.compress_values(v))
        if cached is not None and is_cached:
            return cached.append(new)
        return new

    def _compressed_weights(
        self, q: Float[Tensor, "n h l e"], k: Float[Tensor, "n g c e"], positions: Int[Tensor, "#n l"], scale: float
    ) -> Float[Tensor, "n h l c"]:
        """The weights of complete blocks; zeros for queries before the end of the first."""
        length, stride, *_ = self.sizes
        ends = torch.arange(k.shape[2], device=q.device) * stride + length - 1
        return masked_softmax(q @ self._by_head(k, q).mT * scale, (ends <= positions[..., None])[:, None])

    def _choose(
        self, weights: Float[Tensor, "n h l c"], positions: Int[Tensor, "#n l"], length: int
    ) -> Int[Tensor, "n g l m"]:
        """The earlier blocks of each query, -1 for none: the first, the one before its own, and the best (3.3.2)."""
        importance = self.importance(weights.unflatten(1, (self.kv_heads, -1)).sum(2), length)  # type: ignore[no-untyped-call]
        block = torch.arange(importance.shape[-1], device=weights.device)
        own = (positions // self.sizes.block)[:, None, :, None]
        is_always_seen = (block == 0) | (block == own - 1)
        # the query's own block is attended to anyway, up to itself
        scores = importance.masked_fill(is_always_seen, torch.inf).masked_fill(block >= own, -torch.inf)
        return choose_highest_scores(scores, self.sizes.blocks_seen - 1)

    def importance(self, weights: Float[Tensor, "n g l c"], length: int) -> Float[Tensor, "n g l m"]:
        """The weights that each block of a row of `length` tokens gets from the compressed ones that overlap it.

        A compressed block counts once for each stride that both share (equation 9)."""
        compressed_length, stride, block, *_ = self.sizes
        per_compressed = compressed_length // stride
        per_block = block // stride
        count = count_blocks(length, block)
        # the first block also overlaps compressed ones that begin before it, of which there are none
        padded = F.pad(weights, (per_compressed - 1, count * per_block - weights.shape[-1]))
        width = per_compressed + per_block - 1
        windows = padded.unfold(-1, width, per_block)
        # a product with a vector would copy the overlapping windows of each row
        overlaps = [min(i + 1, per_compressed, per_block, width - i) for i in range(width)]
        return sum((windows[..., i] * share for i, share in enumerate(overlaps)), torch.zeros_like(windows[..., 0]))

    def _by_head(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
