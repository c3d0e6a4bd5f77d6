"""Where a token is: parts that add or rotate position into embeddings, queries, keys, scores or values."""

from manyformer.position.absolute import Learned, Sinusoid
from manyformer.position.base import NoPosition, Position
from manyformer.position.bias import Alibi, T5Buckets
from manyformer.position.distance import ByDistance
from manyformer.position.relative import Shaw
from manyformer.position.rotary import Rotary, convert_pairs
from manyformer.position.scaling import NTK, DynamicNTK, Linear, Scaling, YaRN

__all__ = [
    "NTK",
    "Alibi",
    "ByDistance",
    "DynamicNTK",
    "Learned",
    "Linear",
    "NoPosition",
    "Position",
    "Rotary",
    "Scaling",
    "Shaw",
    "Sinusoid",
    "T5Buckets",
    "YaRN",
    "convert_pairs",
]
