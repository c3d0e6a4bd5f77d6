"""Residual branches and the joins that combine them with the stream."""

from manyformer.nn.residual.residual import (
    AddJoin,
    GatedJoin,
    GRUGate,
    HighwayGate,
    InputGate,
    OutputGate,
    Residual,
    ResidualJoin,
    SigmoidTanhGate,
)

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
