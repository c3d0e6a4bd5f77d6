"""Several kernels on the same queries, keys and values."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Out, Place, State, Watch, ignore
from manyformer.kernels.base import Kernel
from manyformer.position import Position


@final
class Together(Kernel):
    """The sum of what several kernels make of the same queries, keys and values.

    Sinkhorn's mixture with vanilla attention is one (Tay et al. 2020, section 3.5). Raises ValueError for kernels that
    ask for different keys.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        if len(kernels) < 2:
            raise ValueError(f"Together: {len(kernels)} kernels need no sum, give at least 2")
        for kernel in kernels:
            if kernel.folds or kernel.gates or kernel.shares:
                raise ValueError(f"Together: {type(kernel).__name__} asks for keys of its own kind")
        self.kernels = nn.ModuleList(kernels)
        self.honours = frozenset.intersection(*(kernel.honours for kernel in kernels))

    def start(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return [kernel.start(batch, device=device, dtype=dtype) for kernel in self._each()]

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        before = [None] * len(self.kernels) if state is None else state
        outs = [kernel(q, k, v, at, of, position, kept, watch) for kernel, kept in zip(self._each(), before)]
        y, loss = outs[0].y, outs[0].loss
        for out in outs[1:]:
            y, loss = y + out.y, loss + out.loss
        return Out(y, None if state is None else [out.state for out in outs], loss)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> str:
        return "; and ".join(kernel.explain(q, k, v, at, of, position, None, watch) for kernel in self._each())

    def _each(self) -> list[Kernel]:
        return list(self.kernels)  # type: ignore[arg-type]
