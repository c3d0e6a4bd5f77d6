"""Feature maps for linear attention."""

from manyformer.kernels.features.deterministic import (
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    TaylorFeatures,
)
from manyformer.kernels.features.favor import (
    FavorPlusFeatures,
    GeneralizedFavorFeatures,
    HyperbolicFavorFeatures,
    TrigonometricFavorFeatures,
)
from manyformer.kernels.features.feature_map import FeatureMap, FeatureValues, RandomFeatures
from manyformer.kernels.features.learned import HedgehogFeatures, T2RFeatures
from manyformer.kernels.features.random_fourier import ArcCosineFeatures, RandomFourierFeatures
from manyformer.kernels.features.recurrent import ScaledFeatures, UnitLengthFeatures

__all__ = [
    "ArcCosineFeatures",
    "CosineReweightingFeatures",
    "DPFPFeatures",
    "EluPlusOneFeatures",
    "FavorPlusFeatures",
    "FeatureMap",
    "FeatureValues",
    "GeneralizedFavorFeatures",
    "HedgehogFeatures",
    "HyperbolicFavorFeatures",
    "RandomFeatures",
    "RandomFourierFeatures",
    "ScaledFeatures",
    "T2RFeatures",
    "TaylorFeatures",
    "TrigonometricFavorFeatures",
    "UnitLengthFeatures",
]
