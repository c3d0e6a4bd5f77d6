"""The sum of several kernels on the same queries, keys and values."""

from typing import final

import torch
from torch import nn

from manyformer.core import LayerOutput, State
from manyformer.kernels.kernel import Kernel, KernelCall


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
                name = type(kernel).__name__
                raise ValueError(f"SumKernel: {name} is recurrent, ties queries and keys, or needs gates")
        self.kernels = nn.ModuleList(kernels)
        self.supports = frozenset.intersection(*(kernel.supports for kernel in kernels))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return [kernel.init_state(batch, device=device, dtype=dtype) for kernel in self._kernel_list()]

    def forward(self, call: KernelCall) -> LayerOutput:
        if call.state is None:
            states = [None] * len(self.kernels)
        else:
            states = call.state
        outputs = [kernel(call._replace(state=state)) for kernel, state in zip(self._kernel_list(), states)]
        y = outputs[0].y
        loss = outputs[0].loss
        for output in outputs[1:]:
            y = y + output.y
            loss = loss + output.loss
        return LayerOutput(y, None if call.state is None else [output.state for output in outputs], loss)

    def explain(self, call: KernelCall) -> str:
        if call.state is None:
            states = [None] * len(self.kernels)
        else:
            states = call.state
        kernels = zip(self._kernel_list(), states)
        return "; and ".join(kernel.explain(call._replace(state=state)) for kernel, state in kernels)

    def _kernel_list(self) -> list[Kernel]:
        return list(self.kernels)  # type: ignore[arg-type]
