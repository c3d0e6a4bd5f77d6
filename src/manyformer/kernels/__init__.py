"""How queries, keys and values become outputs."""

from manyformer.kernels.base import Kernel
from manyformer.kernels.dynamic_rotary import DynamicRotary
from manyformer.kernels.linear import Linear
from manyformer.kernels.linformer import Linformer
from manyformer.kernels.lsh import LSH
from manyformer.kernels.memorizing import Memorizing
from manyformer.kernels.normed import Normed
from manyformer.kernels.pairs import Pairs
from manyformer.kernels.routing import Routing
from manyformer.kernels.sinkhorn import Sinkhorn
from manyformer.kernels.softmax import Softmax
from manyformer.kernels.together import Together

__all__ = [
    "LSH",
    "DynamicRotary",
    "Kernel",
    "Linear",
    "Linformer",
    "Memorizing",
    "Normed",
    "Pairs",
    "Routing",
    "Sinkhorn",
    "Softmax",
    "Together",
]
