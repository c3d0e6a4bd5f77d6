"""Feature maps for linear attention."""

from manyformer.kernels.features.base import FeatureMap, Features, RandomFeatures
from manyformer.kernels.features.fourier import ArcCosine, Fourier
from manyformer.kernels.features.plain import Cosine, Deterministic, EluPlusOne, Taylor
from manyformer.kernels.features.positive import Generalized, Positive

__all__ = [
    "ArcCosine",
    "Cosine",
    "Deterministic",
    "EluPlusOne",
    "FeatureMap",
    "Features",
    "Fourier",
    "Generalized",
    "Positive",
    "RandomFeatures",
    "Taylor",
]
