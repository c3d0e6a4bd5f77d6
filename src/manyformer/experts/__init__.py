"""Mixtures of experts: feed-forward layers of which a router chooses some for each token."""

from manyformer.experts.expert_layers import ClampedSwiGLU, ExpertLinear, FeedForwardExperts, GatedExperts, GatedUnit
from manyformer.experts.mixture_of_experts import MixtureOfExperts, ScalarGate
from manyformer.experts.routers import RandomSecondRouter, Router, Routing, SigmoidRouter, SoftmaxRouter
from manyformer.experts.routing_losses import LoadBalanceLoss, RouterZLoss, RoutingLoss, SequenceBalanceLoss
from manyformer.experts.selection_bias import SelectionBias

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
