"""Residual branches and the joins that combine them with the stream."""

from manyformer.residual.gated_joins import GatedJoin, GRUGate, HighwayGate, InputGate, OutputGate, SigmoidTanhGate
from manyformer.residual.residual import AddJoin, Residual, ResidualJoin

__all__ = [
    "AddJoin",
    "GRUGate",
    "GatedJoin",
    "HighwayGate",
    "InputGate",
    "OutputGate",
    "Residual",
    "ResidualJoin",
    "SigmoidTanhGate",
]
