"""How queries, keys and values become outputs."""

from manyformer.kernels.base import Kernel
from manyformer.kernels.dynamic_rotary import DynamicRotary
from manyformer.kernels.linear import Linear
from manyformer.kernels.linformer import Linformer
from manyformer.kernels.pairs import Pairs
from manyformer.kernels.softmax import Softmax

__all__ = ["DynamicRotary", "Kernel", "Linear", "Linformer", "Pairs", "Softmax"]
