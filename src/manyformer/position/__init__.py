"""Where a token is: parts that add or rotate position into embeddings, queries, keys, scores or values."""

from manyformer.position.absolute import Learned, Sinusoid
from manyformer.position.base import NoPosition, Position
from manyformer.position.rotary import Rotary, convert_pairs
from manyformer.position.scaling import NTK, DynamicNTK, Linear, Scaling, YaRN

__all__ = [
    "NTK",
    "DynamicNTK",
    "Learned",
    "Linear",
    "NoPosition",
    "Position",
    "Rotary",
    "Scaling",
    "Sinusoid",
    "YaRN",
    "convert_pairs",
]
