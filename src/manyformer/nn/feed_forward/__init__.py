"""Mixtures of experts: feed-forward layers of which a router chooses some for each token."""

from manyformer.nn.feed_forward.mixture_of_experts import (
    ClampedSwiGLU,
    ExpertLinear,
    FeedForwardExperts,
    GatedExperts,
    GatedUnit,
    LoadBalanceLoss,
    MixtureOfExperts,
    RouterZLoss,
    RoutingLoss,
    ScalarGate,
    SequenceBalanceLoss,
)
from manyformer.nn.feed_forward.routers import (
    RandomSecondRouter,
    Router,
    Routing,
    SelectionBias,
    SigmoidRouter,
    SoftmaxRouter,
)

__all__ = [
    "ClampedSwiGLU",
    "ExpertLinear",
    "FeedForwardExperts",
    "GatedExperts",
    "GatedUnit",
    "LoadBalanceLoss",
    "MixtureOfExperts",
    "RandomSecondRouter",
    "Router",
    "RouterZLoss",
    "Routing",
    "RoutingLoss",
    "ScalarGate",
    "SelectionBias",
    "SequenceBalanceLoss",
    "SigmoidRouter",
    "SoftmaxRouter",
]
