"""How queries, keys and values become outputs."""

from manyformer.kernels.base import Kernel
from manyformer.kernels.softmax import Softmax

__all__ = ["Kernel", "Softmax"]
