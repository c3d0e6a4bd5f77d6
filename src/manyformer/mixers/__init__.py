"""Layers that mix tokens without queries, keys and values of the usual kind."""

from manyformer.mixers.beside import Beside
from manyformer.mixers.convolution import SeparableConv
from manyformer.mixers.fourier import Fourier
from manyformer.mixers.pairs import Pairs, Product, Shifts, Table
from manyformer.mixers.recall import Recall
from manyformer.mixers.recurrent import AttendingGRU, BidirectionalGRU
from manyformer.mixers.scores import Dense, DotProduct, FactorizedDense, Fixed, Scores
from manyformer.mixers.spatial_gate import SpatialGate
from manyformer.mixers.synthesizer import Synthesizer
from manyformer.mixers.token_mlp import TokenMLP

__all__ = [
    "AttendingGRU",
    "Beside",
    "BidirectionalGRU",
    "Dense",
    "DotProduct",
    "FactorizedDense",
    "Fixed",
    "Fourier",
    "Pairs",
    "Product",
    "Recall",
    "Scores",
    "SeparableConv",
    "Shifts",
    "SpatialGate",
    "Synthesizer",
    "Table",
    "TokenMLP",
]
