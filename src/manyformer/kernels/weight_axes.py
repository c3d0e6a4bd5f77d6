"""Attention weights that parts of a model report to `watch`, with what their rows and columns are."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Layer, MakesStream, WeightAxes
from manyformer.kernels.kernel import Kernel


class ReportedWeights(NamedTuple):
    """Attention weights of one call: the name of the part that reported them, and what their rows and columns are.

    `implied` says that the part never forms them unless they are watched."""

    part: str
    axes: WeightAxes
    weights: Float[Tensor, "b h l s"]
    implied: bool = False

    @property
    def remembered(self) -> int:
        """The number of leading columns that are no queries of this call: the keys of a stream end with these."""
        if self.axes == WeightAxes():
            return self.weights.shape[-1] - self.weights.shape[-2]
        return 0


class WeightReports:
    """Finds the attention weights among all that parts of `model` report to `watch`."""

    def __init__(self, model: nn.Module) -> None:
        self._axes = weight_axes(model)
        self.names = {module: name for name, module in model.named_modules()}

    def read(self, module: nn.Module, name: str, value: Tensor) -> ReportedWeights | None:
        """The attention weights that a report is; None for all other values."""
        if name == "weights":
            axes = self._axes.get(module, WeightAxes())
        elif name == "sort":
            axes = WeightAxes("blocks", "blocks")
        elif name == "neighbour_weights":
            axes = WeightAxes(keys="neighbours")
        else:
            return None
        implied = isinstance(module, Kernel) and module.implies_weights
        return ReportedWeights(self.names[module], axes, value, implied)


def weight_axes(model: nn.Module) -> dict[nn.Module, WeightAxes]:
    """What the rows and columns are of the weights that each module within a layer reports.

    The innermost layer says what its keys are made of, and modules around it what its stream is made of."""
    axes: dict[nn.Module, WeightAxes] = {}
    for layer in model.modules():
        if isinstance(layer, Layer):
            axes |= dict.fromkeys(layer.modules(), WeightAxes(keys=layer.key_origin))
    for outer in reversed(list(model.modules())):
        if isinstance(outer, MakesStream):
            axes |= {part: outer.outer_axes(axes[part]) for part in outer.modules() if part in axes}
    for kernel in model.modules():
        if isinstance(kernel, Kernel) and kernel.mixes_keys:
            axes[kernel] = WeightAxes(keys="slots")
    return axes
