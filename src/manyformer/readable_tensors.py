"""Whether the host may read the numbers of a tensor: a GPU would have to finish its work first, a graph would end."""

import torch
from torch import Tensor


def is_readable(x: Tensor) -> bool:
    """Whether reading numbers of `x` costs nothing: on a CPU, outside a graph that is being compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
