"""Sinkhorn attention: each block sees itself and a block that a learned sorting puts beside it."""

import math
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.block_sorting import SortingNetwork
from manyformer.kernels.kernel import Kernel
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.ops import sinkhorn_attention as ops
from manyformer.ops.document_grid import DocumentGrid, by_run
from manyformer.position import Position


class DocumentBlocks(NamedTuple):
    """Documents by themselves, in blocks: keys and values of all, queries of those from block `first` on.

    `present` says which tokens there are, None that it does not matter; `grid` is None where rows are documents.
    """

    q: Float[Tensor, "n h m c e"]
    k: Float[Tensor, "n h b c e"]
    v: Float[Tensor, "n h b c f"]
    present: Bool[Tensor, "n b c"] | None
    first: int
    grid: DocumentGrid | None


@final
class SinkhornKernel(Kernel):
    """Softmax over the own block of `block` tokens and a sorted one (Tay et al. 2020, arXiv:2002.11296, section 3).

    `sorting` scores blocks; over `temperature`, in training with `noise` times Gumbel noise, and balanced in `steps`
    steps they are the matrix that mixes keys and values block by block. Its rows always sum to 1; with None steps
    nothing else is balanced. With `Causal()` a block is given earlier ones alone (see
    `manyformer.ops.sinkhorn_attention`). `cut` lets every token see the first so many sorted blocks and nothing else
    (SortCut), with `AllKeys()` only. Blocks are counted in each document by itself. Raises ValueError for what it
    cannot do."""

    supports = frozenset({"query", "key"})

    def __init__(
        self,
        sorting: SortingNetwork,
        block: int,
        mask: Mask | None = None,
        *,
        temperature: float = 0.75,
        steps: int | None = 8,
        noise: float = 1.0,
        cut: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        mask = AllKeys() if mask is None else mask
        if mask not in (Causal(), AllKeys()):
            raise ValueError(f"Sinkhorn mixes whole blocks: mask {mask!r} must be Causal() or None")
        self.causal = mask == Causal()
        if sorting.causal != self.causal:
            what = "looks at" if self.causal else "does not look at"
            raise ValueError(f"Sinkhorn with mask {mask!r}: its sorting {what} whole blocks; build it otherwise")
        if self.causal and cut is not None:
            raise ValueError("SinkhornKernel: cut shows everybody the same blocks, later ones too; it needs no mask")
        for name, value in (("block", block), ("steps", steps), ("cut", cut)):
            if value is not None and value < 1:
                raise ValueError(f"SinkhornKernel: {name} ({value}) must be at least 1")
        if not temperature > 0 or noise < 0:
            raise ValueError(f"SinkhornKernel: temperature ({temperature}) must be above 0, noise ({noise}) at least 0")
        self.sorting, self.block, self.temperature, self.steps = sorting, block, temperature, steps or 0
        self.noise, self.cut, self.scale = noise, cut, scale

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        if not self.causal:
            raise ValueError("Sinkhorn without Causal() sorts a sequence as a whole: it cannot go on from a state")
        return ()

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        if not self.causal and q.shape[2] != k.shape[2]:
            raise ValueError("Sinkhorn sorts the sequence of its queries: for cross-attention use Softmax")
        k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        lines = (
            self._plain(q, k, v)
            if isinstance(key_positions.layout, ContiguousLayout)
            else self._laid(q, k, v, key_positions)
        )
        sort = self._sort(lines, v.dtype)
        watch(self, "sort", sort)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        if self.cut is not None:
            sort = sort[:, :, : self.cut]
            y = ops.attend_cut(*lines[:3], sort, scale=scale, present=lines.present)
        else:
            sort = sort[:, :, lines.first :]
            y = ops.attend(*lines[:3], sort, causal=self.causal, scale=scale, present=lines.present)
        return LayerOutput(self._collected(y, lines, q.shape[2], k.shape[2]), state)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        beside = f"{self.cut} sorted ones alone" if self.cut else "a sorted one beside it"
        return f"blocks: each of {self.block} tokens sees {beside}, {k.shape[2]} tokens in each row"

    def extra_repr(self) -> str:
        causal = "Causal()" if self.causal else "Everything()"
        return f"{self.block}, {causal}, temperature={self.temperature}, steps={self.steps}, cut={self.cut}"

    def _sort(self, lines: DocumentBlocks, dtype: torch.dtype) -> Float[Tensor, "n h b b"]:
        """What mixes the blocks."""
        wide = torch.promote_types(dtype, torch.float32)
        with autocast_disabled(lines.k.device):
            logits = self.sorting(lines.k.to(wide), lines.present)
            if self.training and self.noise:
                logits = logits + self.noise * ops.gumbel(logits)
            valid = None
            if lines.present is not None:
                there = lines.present.any(-1)
                valid = (there[:, :, None] & there[:, None])[:, None]
            return ops.balance(logits / self.temperature, steps=self.steps, causal=self.causal, valid=valid)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> DocumentBlocks:
        length, size = k.shape[2], self.block
        first = (length - q.shape[2]) // size
        end = -length % size
        ahead = length - q.shape[2] - first * size
        k, v = (F.pad(x, (0, 0, 0, end)) if end else x for x in (k, v))
        q = F.pad(q, (0, 0, ahead, end)) if ahead or end else q
        there = None
        if end and not self.causal:
            there = (torch.arange(length + end, device=k.device) < length).view(1, -1, size).expand(len(k), -1, -1)
        return DocumentBlocks(_blocks(q, size), _blocks(k, size), _blocks(v, size), there, first, None)

    def _laid(self, q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions) -> DocumentBlocks:
        laid = by_run(key_positions)
        size, columns = self.block, laid.present.shape[1]
        end = -columns % size
        blocks = [_blocks(F.pad(laid.scatter(x), (0, 0, 0, end)), size) for x in (q, k, v)]
        first = 0
        if q.shape[2] < k.shape[2]:
            begin = k.shape[2] - q.shape[2]
            new = torch.where(
                key_positions.segment_ids[:, begin:] == PADDING_SEGMENT,
                columns - 1,
                key_positions.position_ids[:, begin:],
            )
            first = int(new.min()) // size
        # what is absent comes after everything that a causal block sees
        there = None if self.causal else F.pad(laid.present > 0, (0, end)).view(len(laid.present), -1, size)
        return DocumentBlocks(blocks[0][:, :, first:], blocks[1], blocks[2], there, first, laid)

    def _collected(self, y: Float[Tensor, "n h m c f"], lines: DocumentBlocks, queries: int, keys: int) -> Tensor:
        """Outputs in the order of the queries."""
        begin, y = lines.first * self.block, y.flatten(2, 3)
        if lines.grid is None:
            return y.narrow(2, keys - queries - begin, queries)
        y = F.pad(y, (0, 0, begin, 0))[:, :, : lines.grid.present.shape[1]]
        return lines.grid.gather(y, queries)


def _blocks(x: Float[Tensor, "n h l e"], size: int) -> Float[Tensor, "n h b c e"]:
    return x.view(*x.shape[:2], -1, size, x.shape[-1])
