"""The sum of several kernels on the same queries, keys and values."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.position import Position


@final
class SumKernel(Kernel):
    """The sum of the outputs of several kernels on the same queries, keys and values.

    An example is Sinkhorn attention's mixture with vanilla attention (Tay et al. 2020, section 3.5). Raises ValueError
    for kernels that are recurrent, need gates or tie queries and keys.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        if len(kernels) < 2:
            raise ValueError(f"SumKernel needs at least 2 kernels, got {len(kernels)}")
        for kernel in kernels:
            if kernel.recurrent or kernel.gate_dim or kernel.tied_qk:
                raise ValueError(
                    f"SumKernel: {type(kernel).__name__} is recurrent, ties queries and keys, or needs gates"
                )
        self.kernels = nn.ModuleList(kernels)
        self.supports = frozenset.intersection(*(kernel.supports for kernel in kernels))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return [kernel.init_state(batch, device=device, dtype=dtype) for kernel in self._kernel_list()]

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
        states = [None] * len(self.kernels) if state is None else state
        outputs = [
            kernel(q, k, v, query_positions, key_positions, position, kernel_state, watch)
            for kernel, kernel_state in zip(self._kernel_list(), states)
        ]
        y, loss = outputs[0].y, outputs[0].loss
        for output in outputs[1:]:
            y, loss = y + output.y, loss + output.loss
        return LayerOutput(y, None if state is None else [output.state for output in outputs], loss)

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
            kernel.explain(q, k, v, query_positions, key_positions, position, None, watch)
            for kernel in self._kernel_list()
        )

    def _kernel_list(self) -> list[Kernel]:
        return list(self.kernels)  # type: ignore[arg-type]
