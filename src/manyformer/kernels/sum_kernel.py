"""Several kernels on the same queries, keys and values."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.position import Position


@final
class SumKernel(Kernel):
    """The sum of what several kernels make of the same queries, keys and values.

    Sinkhorn's mixture with vanilla attention is one (Tay et al. 2020, section 3.5). Raises ValueError for kernels that
    ask for different keys.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        if len(kernels) < 2:
            raise ValueError(f"Together: {len(kernels)} kernels need no sum, give at least 2")
        for kernel in kernels:
            if kernel.recurrent or kernel.gate_dim or kernel.tied_qk:
                raise ValueError(f"Together: {type(kernel).__name__} asks for keys of its own kind")
        self.kernels = nn.ModuleList(kernels)
        self.supports = frozenset.intersection(*(kernel.supports for kernel in kernels))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return [kernel.init_state(batch, device=device, dtype=dtype) for kernel in self._each()]

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
        before = [None] * len(self.kernels) if state is None else state
        outs = [
            kernel(q, k, v, query_positions, key_positions, position, kept, watch)
            for kernel, kept in zip(self._each(), before)
        ]
        y, loss = outs[0].y, outs[0].loss
        for out in outs[1:]:
            y, loss = y + out.y, loss + out.loss
        return LayerOutput(y, None if state is None else [out.state for out in outs], loss)

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
        return "; and ".join(
            kernel.explain(q, k, v, query_positions, key_positions, position, None, watch) for kernel in self._each()
        )

    def _each(self) -> list[Kernel]:
        return list(self.kernels)  # type: ignore[arg-type]
