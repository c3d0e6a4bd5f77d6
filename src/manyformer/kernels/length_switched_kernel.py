"""Softmax attention that is sparse for long rows alone."""

from typing import final

from manyformer.core import LayerOutput
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.kernels.softmax_kernel import SoftmaxKernel
from manyformer.masks import Mask


@final
class LengthSwitchedKernel(Kernel):
    """Softmax attention under a mask in rows of more than `full_length` tokens, and to all keys in shorter rows.

    The released code of BigBird (Zaheer et al. 2020, arXiv:2007.14062) computes it so. The length is that of the row
    with its padding, so the outputs for a short text depend on the length of the longest text beside it."""

    supports = SoftmaxKernel.supports
    switches_by_length = True

    def __init__(self, mask: Mask, full_length: int) -> None:
        super().__init__()
        self.full_length = full_length
        self.full = SoftmaxKernel()
        self.sparse = SoftmaxKernel(mask)

    def forward(self, call: KernelCall) -> LayerOutput:
        output: LayerOutput = self._kernel_for(call)(call)
        return output

    def explain(self, call: KernelCall) -> str:
        return self._kernel_for(call).explain(call)

    def extra_repr(self) -> str:
        return f"full_length={self.full_length}"

    def _kernel_for(self, call: KernelCall) -> SoftmaxKernel:
        if call.k.shape[2] <= self.full_length:
            return self.full
        return self.sparse
