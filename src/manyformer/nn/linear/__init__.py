"""Feature maps for linear attention."""

from manyformer.nn.linear.deterministic import (
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    HedgehogFeatures,
    ScaledFeatures,
    T2RFeatures,
    TaylorFeatures,
    UnitLengthFeatures,
)
from manyformer.nn.linear.feature_map import FeatureMap, FeatureValues, RandomFeatures
from manyformer.nn.linear.random_features import (
    ArcCosineFeatures,
    FavorPlusFeatures,
    GeneralizedFavorFeatures,
    HyperbolicFavorFeatures,
    RandomFourierFeatures,
    TrigonometricFavorFeatures,
)

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
