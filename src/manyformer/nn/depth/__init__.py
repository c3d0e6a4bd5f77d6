"""Stacks with other depth than a fixed chain of layers: recurrence over depth, halting, early exit, reversibility."""

from manyformer.nn.depth.adaptive import AdaptiveComputation, GravesHalting, HaltingUnit, ReleasedHalting
from manyformer.nn.depth.reversible import ReversibleStack
from manyformer.nn.depth.universal import FixedSteps, UniversalBlock

__all__ = [
    "AdaptiveComputation",
    "FixedSteps",
    "GravesHalting",
    "HaltingUnit",
    "ReleasedHalting",
    "ReversibleStack",
    "UniversalBlock",
]
