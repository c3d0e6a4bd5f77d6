"""Dynamic NTK rotary positions: the rates depend on the length so far, and cached keys stay unrotated."""

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, tree_map
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.positions.rotary import DynamicNTKRotaryScaling, RotaryPairing, check_widths, rotate, rotation_table
from manyformer.nn.runtime.torch_internals import is_traced

MAX_ROTATED_QUERIES = 16
"""Queries per kernel call for each of which all keys are rotated separately."""


class QueryRange(NamedTuple):
    """Query columns `start` to `stop`; with `shares_rotation` the keys are rotated once for all of them."""

    start: int
    stop: int
    shares_rotation: bool


@final
class DynamicRotaryKernel(Kernel):
    """`inner` over queries and keys rotated as in `RotaryPosition`, with rates that depend on the current length.

    A query at position i, and all keys for it, are rotated with the rates for i + 1 tokens. Its output therefore does
    not depend on later tokens, on the length of the call or on other rows of the batch: decoding equals a full pass.
    (The common implementation takes the length of the whole call, and leaves cached keys rotated for the length at
    which they were cached.) Keys are passed and cached unrotated. Queries within the original length share one
    rotation, as in `RotaryPosition`; each later query rotates all keys, in a full pass and in decoding alike. Needs a
    kernel whose keys are cached."""

    def __init__(
        self,
        inner: Kernel,
        head_dim: int,
        scaling: DynamicNTKRotaryScaling,
        *,
        rotated: int | None = None,
        pairs: RotaryPairing = "interleaved",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.rotated = head_dim if rotated is None else rotated
        check_widths(head_dim, self.rotated, pairs)
        name = type(inner).__name__
        if inner.recurrent:
            raise ValueError(f"DynamicRotaryKernel rotates cached keys, but {name} is recurrent and has none")
        if inner.tied_qk:
            raise ValueError(f"DynamicRotaryKernel rotates keys for each query, but {name} ties queries and keys")
        self.inner = inner
        self.head_dim = head_dim
        self.scaling = scaling
        self.pairs = pairs
        self.base = base
        # a position that acts on keys would be applied before the cache, and then be rotated as well
        self.supports = inner.supports - {"query", "key"}

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, device=device, dtype=dtype)

    def forward(self, call: KernelCall) -> LayerOutput:
        outputs: list[Tensor] = []
        state = call.state
        total_loss: Tensor | float = 0.0
        for start, stop, shares_rotation in self._query_ranges(call.query_positions):
            chunk = call._replace(state=state)
            if stop - start < call.q.shape[2]:
                query_positions = call.query_positions.columns(start, stop)
                chunk = chunk._replace(q=call.q[:, :, start:stop], query_positions=query_positions)
            if shares_rotation:
                rotate_keys = self._rotate_keys_once
            else:
                rotate_keys = self._rotate_keys_per_query
            y, state, loss = self.inner(rotate_keys(chunk))
            outputs.append(y if shares_rotation else _merge_query_rows(y, call.q.shape[0]))
            total_loss = total_loss + loss
        return LayerOutput(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state, total_loss)

    def explain(self, call: KernelCall) -> str:
        ranges = self._query_ranges(call.query_positions)
        num_extrapolated = sum(stop - start for start, stop, shares_rotation in ranges if not shares_rotation)
        if not num_extrapolated:
            return self.inner.explain(call)
        reason = f"for each of {num_extrapolated} queries beyond {self.scaling.original_length}"
        return f"{self.inner.explain(call)}; the keys are rotated {reason}"

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.scaling}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}"

    def _query_ranges(self, query_positions: TokenPositions) -> Iterator[QueryRange]:
        """One range for the columns within the original length in every row, then ranges of `MAX_ROTATED_QUERIES`."""
        length = query_positions.position_ids.shape[1]
        beyond = query_positions.position_ids >= self.scaling.original_length
        # columns, not tokens: all rows of a call share one division into ranges
        extrapolated = (beyond & (query_positions.segment_ids != PADDING_SEGMENT)).any(0)
        if bool(extrapolated.any()):
            num_within = int(extrapolated.int().argmax())
        else:
            num_within = length
        if num_within or not length:
            yield QueryRange(0, num_within, shares_rotation=True)
        for start in range(num_within, length, MAX_ROTATED_QUERIES):
            yield QueryRange(start, min(start + MAX_ROTATED_QUERIES, length), shares_rotation=False)

    def _rotate_keys_once(self, call: KernelCall) -> KernelCall:
        # a length of 0 is within the original one, and leaves the rates as they are
        unscaled = torch.zeros_like(call.query_positions.position_ids[:1, :1])
        return call._replace(
            q=self._rotate(call.q, call.query_positions.position_ids, unscaled),
            k=self._rotate(call.k, call.key_positions.position_ids, unscaled),
        )

    def _rotate_keys_per_query(self, call: KernelCall) -> KernelCall:
        """Make every query a row of the batch, with the keys rotated for it."""
        rows = call.q.shape[0]
        queries = call.q.shape[2]
        query_positions = tree_map(lambda t: t.expand(rows, -1).reshape(-1, 1), call.query_positions)
        key_positions = tree_map(
            # a layout speaks of rows of the batch, which are single queries now
            lambda t: t.expand(rows, -1).repeat_interleave(queries, dim=0),
            call.key_positions._replace(layout=None),
        )
        # (b l, h, 1, e)
        q = call.q.transpose(1, 2).flatten(0, 1)[:, :, None]
        k, v = (x.repeat_interleave(queries, dim=0) for x in (call.k, call.v))
        return call._replace(
            q=self._rotate(q, query_positions.position_ids, query_positions.position_ids + 1),
            k=self._rotate(k, key_positions.position_ids, query_positions.position_ids + 1),
            v=v,
            query_positions=query_positions._replace(layout=None),
            key_positions=key_positions,
        )

    def _rotate(self, x: Tensor, position_ids: Int[Tensor, "b l"], lengths: Int[Tensor, "#b 1"]) -> Tensor:
        rates = self.scaling.frequencies(self.rotated, self.base, lengths)
        idle = 0
        if self.pairs != "halves":
            idle = (self.head_dim - self.rotated) // 2
        table = rotation_table(position_ids.to(rates.device)[..., None] * rates, unrotated_pairs=idle)
        table = table.to(torch.promote_types(x.dtype, torch.float32)).to(x.device)
        return rotate(x, table[:, None], self.pairs, traced=is_traced())


def _merge_query_rows(y: Float[Tensor, "bl h 1 f"], rows: int) -> Float[Tensor, "b h l f"]:
    """Undo `_rotate_keys_per_query`: outputs of queries that were rows of the batch."""
    return y[:, :, 0].reshape(rows, -1, y.shape[1], y.shape[-1]).transpose(1, 2)
