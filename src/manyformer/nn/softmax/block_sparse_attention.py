"""Exact softmax attention over the visible blocks of a mask, with its own gradient and cost linear in these blocks.

A plan splits the pairs of queries and keys into disjoint parts and each part into blocks. A few blocks at a time are
computed, as views or gathered; parts are merged by their log-sum-exps, and the gradient of each is taken with the
merged output (Dao et al. 2022, arXiv:2205.14135, appendix B.4). Weights are saved for the gradient where they are few.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.ops import attention_with_lse, tile_softmax
from manyformer.nn.ops.tile_softmax import OutputGradient, TileCall
from manyformer.nn.runtime.device_reads import ScratchBuffer
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled
from manyformer.nn.softmax.block_cover import BlockOrder
from manyformer.nn.softmax.sparse_plan import BlockTiles, HeadGroup, MaskPart, SparsePlan

MAX_SAVED_WEIGHTS = 1 << 26
"""Up to this many weights, 256 MB, are saved for the gradient, which saves a sixth of the time."""

MAX_SAVED_KEYS_VALUES = 1 << 24
"""Up to this many elements of gathered keys and values, 64 MB, are saved for the gradient as well."""

SCORES_PER_STEP = 1 << 21
"""Scores per call of tiles: few enough to fit a cache, many enough to amortize the overhead of a call."""


@compiler_disabled
def block_sparse_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    plan: SparsePlan,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention over the pairs in `plan`, in float32 at least; a query that sees no key gets zeros."""
    dtype = v.dtype
    compute_dtype = torch.promote_types(v.dtype, torch.float32)
    y: Tensor = _BlockSparseAttention.call(*(x.to(compute_dtype) for x in (q, k, v)), plan, scale)
    return y.to(dtype)


class _BlockSparseAttention(HandwrittenGradient):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, heads, length, _ = q.shape
        y = q.new_zeros(batch, heads, length, v.shape[-1])
        lse = q.new_full((batch, heads, length), -torch.inf)
        pairs = plan.num_pairs(batch)
        gathered = plan.num_gathered(batch) * (k.shape[-1] + v.shape[-1])
        saves_weights = any(ctx.needs_input_grad) and pairs <= MAX_SAVED_WEIGHTS
        saves_tiles = gathered <= MAX_SAVED_KEYS_VALUES
        runner = _PartRunner(scale, ScratchBuffer(q), saves_weights=saves_weights, saves_tiles=saves_tiles)
        with autocast_disabled(q.device):
            for row, head_group, is_first in _iterate_groups(plan, batch):
                group_inputs = [_select_heads(x[row], head_group, heads) for x in (q, k, v)]
                group_outputs = [_select_heads(x[row], head_group, heads) for x in (y, lse)]
                for index, part in enumerate(head_group.parts):
                    runner.forward(group_inputs, group_outputs, part, is_first=is_first and index == 0)
                if not _heads_are_contiguous(head_group):
                    # heads that are not consecutive were copied
                    y[row, list(head_group.heads)], lse[row, list(head_group.heads)] = group_outputs
        y = _to_token_major(y)
        ctx.save_for_backward(q, k, v, y, lse)
        runner.scratch.clear()
        ctx.plan = plan
        ctx.runner = runner
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        delta = (grad_y * y).sum(-1, keepdim=True)
        grad_y = grad_y.contiguous()
        # queries without keys get zero weights in every part
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        runner = ctx.runner.for_backward()
        with autocast_disabled(q.device):
            for row, head_group, _ in _iterate_groups(ctx.plan, q.shape[0]):
                group_inputs = [_select_heads(x[row], head_group, q.shape[1]) for x in (q, k, v, grad_y, delta, lse)]
                accumulates = [_heads_are_contiguous(head_group) and grad.shape[1] == q.shape[1] for grad in grads]
                group_grads = [
                    _select_heads(grad[row], head_group, q.shape[1]) if in_place else torch.zeros_like(x)
                    for grad, x, in_place in zip(grads, group_inputs, accumulates)
                ]
                for part in head_group.parts:
                    runner.backward(group_inputs, group_grads, part)
                for grad, group_grad, in_place in zip(grads, group_grads, accumulates):
                    if not in_place:
                        # heads that share keys and values add up their gradients
                        kv_heads = torch.tensor(head_group.heads, device=grad.device) * grad.shape[1] // q.shape[1]
                        grad[row].index_add_(0, kv_heads, group_grad)
        runner.scratch.clear()
        scales = (runner.scale, runner.scale, 1.0)
        return *(_to_token_major(grad, scale) for grad, scale in zip(grads, scales)), None, None


class TileStep(NamedTuple):
    """Some rows of one head, or for several heads their rows with the same keys, concatenated.

    `rows` index those of the tiles; `heads` is an int in the first case. `first_query_block` is the first query block
    where rows are consecutive.
    """

    tiles: BlockTiles
    heads: int | slice
    rows: slice
    first_query_block: int | None
    bias: Float[Tensor, "#n c s"] | None
    rows_without_keys: Bool[Tensor, "#n c"] | None

    @property
    def shorter_rows(self) -> Iterator[tuple[slice, int]]:
        """The rows with fewer key blocks, and their number of key blocks."""
        across = isinstance(self.heads, slice)
        for row, num_blocks in self.tiles.shorter_rows:
            if self.rows.start <= row < self.rows.stop:
                begin = row - self.rows.start
                yield slice(None) if across else slice(begin, begin + 1), num_blocks

    def select_queries(self, x: Float[Tensor, "h n c *e"]) -> Float[Tensor, "r _c *e"]:
        """The query blocks, as a view where rows are consecutive."""
        if self.first_query_block is None:
            return x[self.heads].index_select(0, self._row_index(x))
        selected = x[self.heads, self.first_query_block : self.first_query_block + self.rows.stop - self.rows.start]
        if isinstance(self.heads, slice):
            return selected.flatten(1, 2)
        return selected

    def write_queries(self, new: Float[Tensor, "r _c *e"], out: Float[Tensor, "h n c *e"]) -> None:
        """Write `new` to the query blocks of `out`."""
        if self.first_query_block is None:
            out[self.heads].index_copy_(0, self._row_index(out), new)
        else:
            self.select_queries(out).copy_(new)

    def write_product(
        self, left: Float[Tensor, "r _c s"], right: Float[Tensor, "r s e"], out: Float[Tensor, "h n c e"]
    ) -> None:
        """Write the product of `left` and `right` to the query blocks of `out`."""
        if self.first_query_block is None:
            self.write_queries(torch.bmm(left, right), out)
        else:
            torch.bmm(left, right, out=self.select_queries(out))

    def add_product(
        self, left: Float[Tensor, "r _c s"], right: Float[Tensor, "r s e"], out: Float[Tensor, "h n c e"]
    ) -> None:
        """Add the product of `left` and `right` to the query blocks of `out`."""
        if self.first_query_block is None:
            out[self.heads].index_add_(0, self._row_index(out), torch.bmm(left, right))
        else:
            self.select_queries(out).baddbmm_(left, right)

    def select_keys(self, x: Float[Tensor, "h n c e"]) -> Float[Tensor, "r s e"]:
        """The key blocks of each row, concatenated; overlapping views where they are contiguous."""
        head_blocks = x[self.heads]
        num_keys = self.tiles.columns.shape[1] * x.shape[2]
        if self.tiles.step is None:
            gathered = head_blocks.index_select(1 if isinstance(self.heads, slice) else 0, self._column_index(x))
            return gathered.view(-1, num_keys, x.shape[-1])
        head, block, token, channel = x.stride()
        if isinstance(self.heads, slice):
            count = len(head_blocks)
            stride = head
        else:
            count = self.rows.stop - self.rows.start
            stride = self.tiles.step * block
        # windows of consecutive rows overlap in memory: each row's keys begin `step` blocks after those before
        offset = head_blocks.storage_offset() + self._first_key_block * block
        return head_blocks.as_strided((count, num_keys, x.shape[-1]), (stride, token, channel), offset)

    def add_to_keys(
        self,
        left: Float[Tensor, "r _c s"],
        right: Float[Tensor, "r _c e"],
        out: Float[Tensor, "h n c e"],
        scratch: ScratchBuffer,
    ) -> None:
        """Add the product of `left`^T and `right`, by key, to the key blocks of `out`."""
        step = self.tiles.step
        num_columns = self.tiles.columns.shape[1]
        head_blocks = out[self.heads]
        if step is None:
            new = torch.bmm(left.mT, right, out=scratch("to_keys", len(left), left.shape[-1], right.shape[-1]))
            parts = new.view(len(new), num_columns, -1, new.shape[-1])
            if isinstance(self.heads, slice):
                head_blocks.index_add_(1, self._column_index(out), parts)
            else:
                head_blocks.flatten(1).index_add_(0, self._column_index(out), parts.view(len(new) * num_columns, -1))
        elif isinstance(self.heads, slice):
            key_blocks = head_blocks[:, self._first_key_block : self._first_key_block + num_columns]
            key_blocks.flatten(1, 2).baddbmm_(left.mT, right)
        elif step == 0:
            key_blocks = head_blocks[self._first_key_block : self._first_key_block + num_columns]
            key_blocks.flatten(0, 1).addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        else:
            # added in place: first the first blocks of all rows, then the second ones
            for number, part in enumerate(left.chunk(num_columns, -1), self._first_key_block):
                head_blocks[number : number + len(left)].baddbmm_(part.mT, right)

    @property
    def _first_key_block(self) -> int:
        """The first key block, where key blocks are contiguous."""
        return int(self.tiles.columns[self.rows.start, 0])

    def _row_index(self, x: Tensor) -> Int[Tensor, " r"]:
        return self.tiles.rows[self.rows].to(x.device)

    def _column_index(self, x: Tensor) -> Int[Tensor, " k"]:
        """Key block indices, row by row; a single row's where all have the same."""
        rows = self.tiles.columns[self.rows]
        return (rows[:1] if isinstance(self.heads, slice) else rows).flatten().to(x.device)


def make_steps(part: MaskPart, heads: int, like: Tensor) -> Iterator[TileStep]:
    """Yield all calls of a part, always in the same order; their additive masks have the dtype of `like`."""
    for tiles in part.tiles:
        count = len(tiles.rows)
        max_rows = max(SCORES_PER_STEP // (part.q.size * tiles.columns.shape[1] * part.k.size), 1)
        # few rows, such as those of global tokens: a call for all heads together instead of one for each
        across = tiles.same_keys or count < max(heads, 2)
        size = max_rows if tiles.same_keys or not across else 1
        for begin in range(0, count, size):
            rows = slice(begin, min(begin + size, count))
            bias, rows_without_keys = _mask_bias(tiles, rows, like)
            first_query_block = None
            if across or tiles.rows_adjacent:
                first_query_block = int(tiles.rows[begin])
            heads_per_step = max(max_rows // (rows.stop - begin), 1)
            starts = range(0, heads, heads_per_step)
            slices = (slice(head, min(head + heads_per_step, heads)) for head in starts) if across else range(heads)
            for head_slice in slices:
                yield TileStep(tiles, head_slice, rows, first_query_block, bias, rows_without_keys)


def _mask_bias(tiles: BlockTiles, rows: slice, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Additive mask of these rows (a single one if all are equal), and the queries without keys.

    Hidden pairs get a finite number, so that the weights of a query without keys are wrong but not nan.
    """
    if tiles.inner is None:
        return None, None
    inner = tiles.inner
    rows_without_keys = tiles.rows_without_keys
    inner = inner if len(inner) == 1 else inner[rows]
    if rows_without_keys is not None and len(rows_without_keys) > 1:
        rows_without_keys = rows_without_keys[rows]
    bias = torch.zeros(inner.shape, dtype=like.dtype, device=like.device)
    # added to a score it stays finite
    bias.masked_fill_(~inner.to(like.device), torch.finfo(like.dtype).min)
    return bias, None if rows_without_keys is None else rows_without_keys.to(like.device)


class _PartRunner:
    """Runs all parts of a plan in order, forward or backward, with the tensors saved in between.

    Saves the log-sum-exps of parts, the weights if `saves_weights`, and gathered keys and values if `saves_tiles`.
    """

    def __init__(self, scale: float, scratch: ScratchBuffer, *, saves_weights: bool, saves_tiles: bool) -> None:
        self.scale = scale
        self.scratch = scratch
        self.saves_weights = saves_weights
        self.saves_tiles = saves_tiles
        self.saved: list[tuple[TileCall | None, Tensor]] = []
        self.lses: list[Tensor | None] = []

    def for_backward(self) -> "_PartRunner":
        """A runner for the backward pass, which pops saved tensors in forward order."""
        runner = _PartRunner(self.scale, self.scratch, saves_weights=self.saves_weights, saves_tiles=self.saves_tiles)
        runner.saved = self.saved[::-1]
        runner.lses = self.lses[::-1]
        return runner

    def forward(self, inputs: list[Tensor], outputs: list[Tensor], part: MaskPart, *, is_first: bool) -> None:
        """Merge attention to the part's keys into `outputs`, the outputs and log-sum-exps of all queries."""
        q, k, v = (_to_blocks(x, order) for x, order in zip(inputs, (part.q, part.k, part.k)))
        # nothing is there to merge with, so that products are written where the output is
        direct = (is_first or part.is_exclusive) and part.q.is_view
        if direct:
            y = _block_view(outputs[0], part.q)
        else:
            y = q.new_zeros(*q.shape[:3], v.shape[-1])
        if part.is_exclusive:
            lse = None
        else:
            lse = q.new_full(q.shape[:3], -torch.inf)
        for step in make_steps(part, q.shape[0], q):
            call = _make_call(step, q, k, v)
            if self.saves_weights:
                tile_weights = q.new_empty(call.shape)
            else:
                tile_weights = self.scratch("weights", *call.shape)
            # writing to a second buffer costs most
            if lse is None:
                scores = tile_weights
            else:
                scores = self.scratch("scores", *call.shape)
            tile_softmax.compute_weights(call, self.scale, scores, tile_weights)
            step.write_product(tile_weights, call.v, y)
            if lse is not None:
                step.write_queries(tile_softmax.log_sum_exps(call, scores, tile_weights), lse)
            if self.saves_weights:
                self.saved.append((call if self.saves_tiles else None, tile_weights))
        self.lses.append(lse)
        if lse is not None and direct:
            _block_view(outputs[1], part.q).copy_(lse)
        elif not direct:
            _merge_outputs(outputs, part, y, lse, is_first=is_first)

    def backward(self, inputs: list[Tensor], grads: list[Tensor], part: MaskPart) -> None:
        """Add the part's gradients to `grads`, those of the queries, keys and values in `inputs`."""
        orders = (part.q, part.k, part.k)
        q, k, v = (_to_blocks(x, order) for x, order in zip(inputs, orders))
        grad_y, delta, total_lse = (_to_blocks(x, part.q) for x in inputs[3:])
        lse = self.lses.pop()
        if lse is not None:
            # the part's share of each query's weights: its own softmax times that is the softmax over all parts
            share = (lse - total_lse).exp_()[..., None]
            grad_y = grad_y * share
            delta = delta * share
        part_grads = [
            _block_view(grad, order) if order.is_view else x.new_zeros(x.shape)
            for grad, order, x in zip(grads, orders, (q, k, v))
        ]
        for step in make_steps(part, q.shape[0], q):
            call, tile_weights = self._restore_tile(step, q, k, v)
            output_gradient = OutputGradient(step.select_queries(grad_y), step.select_queries(delta))
            grad_scores = tile_softmax.score_gradient(call, tile_weights, output_gradient, self.scratch)
            (step.write_product if part.is_exclusive else step.add_product)(grad_scores, call.k, part_grads[0])
            step.add_to_keys(grad_scores, call.q, part_grads[1], self.scratch)
            step.add_to_keys(tile_weights, output_gradient.grad_y, part_grads[2], self.scratch)
        for grad, order, part_grad in zip(grads, orders, part_grads):
            if not order.is_view:
                _scatter_add(grad, order, part_grad.flatten(1, 2)[:, : order.num_tokens])

    def _restore_tile(self, step: TileStep, q: Tensor, k: Tensor, v: Tensor) -> tuple[TileCall, Tensor]:
        """The saved or recomputed call of a step, and its weights."""
        call, tile_weights = self.saved.pop() if self.saves_weights else (None, None)
        call = _make_call(step, q, k, v) if call is None else call
        return call, tile_softmax.recompute_weights(
            call, self.scale, self.scratch
        ) if tile_weights is None else tile_weights


def _to_token_major(x: Float[Tensor, "b h l e"], scale: float = 1.0) -> Float[Tensor, "b h l e"]:
    """`x` times `scale` with the heads of a token adjacent in memory, the layout of the output projection."""
    out = x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    if scale == 1.0:
        return out.copy_(x)
    return torch.mul(x, scale, out=out)


def _scatter_add(total: Float[Tensor, "h l e"], order: BlockOrder, update: Float[Tensor, "h t e"]) -> None:
    """Add `update`, in an order's tokens, to `total`, in all tokens."""
    if order.is_identity:
        total += update
        return
    tokens = order.tokens.to(update.device)
    # head by head: index_add_ along any axis but the first takes many times as long
    for head_total, head_update in zip(total, update):
        head_total.index_add_(0, tokens, head_update)


def _make_call(step: TileStep, q: Tensor, k: Tensor, v: Tensor) -> TileCall:
    shorter_rows = tuple((rows, num_blocks * k.shape[2]) for rows, num_blocks in step.shorter_rows)
    tokens = step.select_queries(q), step.select_keys(k), step.select_keys(v)
    return TileCall(*tokens, step.bias, step.rows_without_keys, shorter_rows)


def _merge_outputs(outputs: list[Tensor], part: MaskPart, y: Tensor, lse: Tensor | None, *, is_first: bool) -> None:
    """Merge a part's `y` and `lse`, in blocks, into `outputs` = [y, lse] of all queries."""
    tokens = slice(None) if part.q.is_identity else part.q.tokens.to(y.device)
    y = y.flatten(1, 2)[:, : part.q.num_tokens]
    if lse is None:
        outputs[0][:, tokens] = y
        return
    lse = lse.flatten(1, 2)[:, : part.q.num_tokens]
    if is_first:
        outputs[0][:, tokens] = y
        outputs[1][:, tokens] = lse
    else:
        merged = (outputs[0][:, tokens], outputs[1][:, tokens])
        attention_with_lse.merge_lse(merged[0], merged[1], y, lse)
        if not part.q.is_identity:
            outputs[0][:, tokens], outputs[1][:, tokens] = merged


def _to_blocks(x: Float[Tensor, "h l *e"], order: BlockOrder) -> Float[Tensor, "h n c *e"]:
    """Tokens reordered and split into blocks, the last one padded with zeros."""
    if not order.is_identity:
        x = x.index_select(1, order.tokens.to(x.device))
    padding = order.blocks.numel() - order.num_tokens
    if padding:
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, padding])
    return _block_view(x, order)


def _block_view(x: Float[Tensor, "h l *e"], order: BlockOrder) -> Float[Tensor, "h n c *e"]:
    """Tokens that are already in order as a view of blocks."""
    return x.view(x.shape[0], *order.blocks.shape, *x.shape[2:])


def _iterate_groups(plan: SparsePlan, batch: int) -> Iterator[tuple[int, HeadGroup, bool]]:
    """Every row's head groups, each with whether its heads occur for the first time."""
    for row in range(batch):
        visited_heads: set[int] = set()
        for head_group in plan.rows[row % len(plan.rows)]:
            yield row, head_group, visited_heads.isdisjoint(head_group.heads)
            visited_heads.update(head_group.heads)


def _heads_are_contiguous(head_group: HeadGroup) -> bool:
    """Whether the heads are consecutive, so that indexing them gives a view."""
    return head_group.heads[-1] - head_group.heads[0] + 1 == len(head_group.heads)


def _select_heads(x: Tensor, head_group: HeadGroup, heads: int) -> Tensor:
    """The group's heads of `x`, which has fewer heads where keys and values are shared."""
    if _heads_are_contiguous(head_group) and x.shape[0] == heads:
        return x[head_group.heads[0] : head_group.heads[-1] + 1]
    return x[[head * x.shape[0] // heads for head in head_group.heads]]
