"""How layers follow each other: what is not simply one after the other."""

from manyformer.depth.adaptive import AdaptiveComputation
from manyformer.depth.halting import GravesHalting, HaltingUnit, ReleasedHalting
from manyformer.depth.reversible import ReversibleStack
from manyformer.depth.universal import FixedSteps, UniversalBlock

__all__ = [
    "AdaptiveComputation",
    "FixedSteps",
    "GravesHalting",
    "HaltingUnit",
    "ReleasedHalting",
    "ReversibleStack",
    "UniversalBlock",
]
