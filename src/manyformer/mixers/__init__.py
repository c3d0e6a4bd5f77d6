"""Layers that mix tokens by other means than attention of query-key products, and variants of attention."""

from manyformer.core import ParallelLayers
from manyformer.mixers.convolution_module import SeparableConv
from manyformer.mixers.gru import AttendingGRU, BidirectionalGRU, FixedVectorGRU, ForwardGRU
from manyformer.mixers.neighbour_attention import NeighbourAttention
from manyformer.mixers.synthesizer_attention import (
    DenseScores,
    DotProductScores,
    FactorizedDenseScores,
    FixedScores,
    SynthesizerAttention,
    SynthesizerScores,
)
from manyformer.mixers.token_mixing import (
    FactorizedPairs,
    FourierMixer,
    LinearMixer,
    PairTable,
    PositionPairs,
    SpatialGate,
    ToeplitzPairs,
    TokenMLP,
)

__all__ = [
    "AttendingGRU",
    "BidirectionalGRU",
    "DenseScores",
    "DotProductScores",
    "FactorizedDenseScores",
    "FactorizedPairs",
    "FixedScores",
    "FixedVectorGRU",
    "ForwardGRU",
    "FourierMixer",
    "LinearMixer",
    "NeighbourAttention",
    "PairTable",
    "ParallelLayers",
    "PositionPairs",
    "SeparableConv",
    "SpatialGate",
    "SynthesizerAttention",
    "SynthesizerScores",
    "ToeplitzPairs",
    "TokenMLP",
]
