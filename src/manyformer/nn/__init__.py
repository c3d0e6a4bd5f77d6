"""Layers, by mechanism: a room for each, with its layer, its kernel, its operators and its step of one token.

The names below are imported when they are first used, because a room stands on others."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyformer.nn.attention.attention import Attention, default_source, named_attention, split_heads
    from manyformer.nn.attention.neighbour_attention import NeighbourAttention
    from manyformer.nn.clustered.lsh_kernel import LSHKernel
    from manyformer.nn.clustered.routing_kernel import RoutingKernel
    from manyformer.nn.clustered.sinkhorn_kernel import SinkhornKernel
    from manyformer.nn.convolution.convolution_module import SeparableConv
    from manyformer.nn.core import ParallelLayers
    from manyformer.nn.kernels.composed_kernels import QKNormKernel, SumKernel
    from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
    from manyformer.nn.kernels.pairwise_kernel import PairwiseKernel
    from manyformer.nn.linear.linear_kernel import LinearKernel
    from manyformer.nn.linear.lolcats_kernel import LolcatsKernel
    from manyformer.nn.low_rank.linformer_kernel import LinformerKernel
    from manyformer.nn.recurrent.gru import AttendingGRU, BidirectionalGRU, FixedVectorGRU, ForwardGRU
    from manyformer.nn.runtime.handwritten_gradient import plain_operations
    from manyformer.nn.softmax.dynamic_rotary import DynamicRotaryKernel
    from manyformer.nn.softmax.forgetting_kernel import ForgettingKernel
    from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
    from manyformer.nn.sparse.memorizing_kernel import MemorizingKernel
    from manyformer.nn.token_mixing import (
        FactorizedPairs,
        FourierMixer,
        LinearMixer,
        PairTable,
        PositionPairs,
        SpatialGate,
        ToeplitzPairs,
        TokenMLP,
    )
    from manyformer.nn.token_mixing.synthesizer_attention import (
        DenseScores,
        DotProductScores,
        FactorizedDenseScores,
        FixedScores,
        SynthesizerAttention,
        SynthesizerScores,
    )

_MODULES = {
    "AttendingGRU": "recurrent.gru",
    "Attention": "attention.attention",
    "BidirectionalGRU": "recurrent.gru",
    "DenseScores": "token_mixing.synthesizer_attention",
    "DotProductScores": "token_mixing.synthesizer_attention",
    "DynamicRotaryKernel": "softmax.dynamic_rotary",
    "FactorizedDenseScores": "token_mixing.synthesizer_attention",
    "FactorizedPairs": "token_mixing",
    "FixedScores": "token_mixing.synthesizer_attention",
    "FixedVectorGRU": "recurrent.gru",
    "ForgettingKernel": "softmax.forgetting_kernel",
    "ForwardGRU": "recurrent.gru",
    "FourierMixer": "token_mixing",
    "Kernel": "kernels.kernel",
    "KernelCall": "kernels.kernel",
    "LSHKernel": "clustered.lsh_kernel",
    "LinearKernel": "linear.linear_kernel",
    "LinearMixer": "token_mixing",
    "LinformerKernel": "low_rank.linformer_kernel",
    "LolcatsKernel": "linear.lolcats_kernel",
    "MemorizingKernel": "sparse.memorizing_kernel",
    "NeighbourAttention": "attention.neighbour_attention",
    "PairTable": "token_mixing",
    "PairwiseKernel": "kernels.pairwise_kernel",
    "ParallelLayers": "core",
    "PositionPairs": "token_mixing",
    "QKNormKernel": "kernels.composed_kernels",
    "RoutingKernel": "clustered.routing_kernel",
    "SeparableConv": "convolution.convolution_module",
    "SinkhornKernel": "clustered.sinkhorn_kernel",
    "SoftmaxKernel": "softmax.softmax_kernel",
    "SpatialGate": "token_mixing",
    "SumKernel": "kernels.composed_kernels",
    "SynthesizerAttention": "token_mixing.synthesizer_attention",
    "SynthesizerScores": "token_mixing.synthesizer_attention",
    "ToeplitzPairs": "token_mixing",
    "TokenMLP": "token_mixing",
    "default_source": "attention.attention",
    "named_attention": "attention.attention",
    "named_kernels": "kernels.kernel",
    "plain_operations": "runtime.handwritten_gradient",
    "split_heads": "attention.attention",
}

__all__ = [
    "AttendingGRU",
    "Attention",
    "BidirectionalGRU",
    "DenseScores",
    "DotProductScores",
    "DynamicRotaryKernel",
    "FactorizedDenseScores",
    "FactorizedPairs",
    "FixedScores",
    "FixedVectorGRU",
    "ForgettingKernel",
    "ForwardGRU",
    "FourierMixer",
    "Kernel",
    "KernelCall",
    "LSHKernel",
    "LinearKernel",
    "LinearMixer",
    "LinformerKernel",
    "LolcatsKernel",
    "MemorizingKernel",
    "NeighbourAttention",
    "PairTable",
    "PairwiseKernel",
    "ParallelLayers",
    "PositionPairs",
    "QKNormKernel",
    "RoutingKernel",
    "SeparableConv",
    "SinkhornKernel",
    "SoftmaxKernel",
    "SpatialGate",
    "SumKernel",
    "SynthesizerAttention",
    "SynthesizerScores",
    "ToeplitzPairs",
    "TokenMLP",
    "default_source",
    "named_attention",
    "named_kernels",
    "plain_operations",
    "split_heads",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
