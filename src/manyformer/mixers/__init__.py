"""Layers that mix tokens by other means than attention of query-key products, and variants of attention."""

from manyformer.mixers.fixed_vector_gru import FixedVectorGRU, ForwardGRU
from manyformer.mixers.fourier_mixer import FourierMixer
from manyformer.mixers.gru import AttendingGRU, BidirectionalGRU
from manyformer.mixers.linear_mixer import LinearMixer
from manyformer.mixers.neighbour_attention import NeighbourAttention
from manyformer.mixers.parallel import ParallelLayers
from manyformer.mixers.position_pairs import FactorizedPairs, PairTable, PositionPairs, ToeplitzPairs
from manyformer.mixers.separable_conv import SeparableConv
from manyformer.mixers.spatial_gate import SpatialGate
from manyformer.mixers.synthesizer_attention import SynthesizerAttention
from manyformer.mixers.synthesizer_scores import (
    DenseScores,
    DotProductScores,
    FactorizedDenseScores,
    FixedScores,
    SynthesizerScores,
)
from manyformer.mixers.token_mlp import TokenMLP

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
