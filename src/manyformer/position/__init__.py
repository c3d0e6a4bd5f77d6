"""Where a token is: parts that add or rotate position into embeddings, queries, keys, scores or values."""

from manyformer.position.absolute import Absolute, Learned, Sinusoid
from manyformer.position.aware import DistanceAware
from manyformer.position.base import NoPosition, Position
from manyformer.position.bias import Alibi, T5Buckets
from manyformer.position.distance import ByDistance
from manyformer.position.distances import Distances
from manyformer.position.grid import GridConcat, GridSum
from manyformer.position.labels import Labels
from manyformer.position.layerwise import LearnedHeads, Placed
from manyformer.position.relative import Shaw
from manyformer.position.rotary import Rotary, convert_pairs
from manyformer.position.scaling import NTK, DynamicNTK, Linear, Scaling, YaRN
from manyformer.position.structural import Fused, Structural
from manyformer.position.timing import LearnedSteps, NoSteps, SinusoidSteps, Steps, Timing
from manyformer.position.together import Together
from manyformer.position.xl import XL, XLBiases

__all__ = [
    "NTK",
    "XL",
    "Absolute",
    "Alibi",
    "ByDistance",
    "DistanceAware",
    "Distances",
    "DynamicNTK",
    "Fused",
    "GridConcat",
    "GridSum",
    "Labels",
    "Learned",
    "LearnedHeads",
    "LearnedSteps",
    "Linear",
    "NoPosition",
    "NoSteps",
    "Placed",
    "Position",
    "Rotary",
    "Scaling",
    "Shaw",
    "Sinusoid",
    "SinusoidSteps",
    "Steps",
    "Structural",
    "T5Buckets",
    "Timing",
    "Together",
    "XLBiases",
    "YaRN",
    "convert_pairs",
]
