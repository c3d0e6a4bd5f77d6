"""Attention kernels: the algorithms that compute outputs from queries, keys and values."""

from manyformer.kernels.composed_kernels import QKNormKernel, SumKernel
from manyformer.kernels.dynamic_rotary import DynamicRotaryKernel
from manyformer.kernels.forgetting_kernel import ForgettingKernel
from manyformer.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.kernels.linear_kernel import LinearKernel
from manyformer.kernels.linformer_kernel import LinformerKernel
from manyformer.kernels.lolcats_kernel import LolcatsKernel
from manyformer.kernels.lsh_kernel import LSHKernel
from manyformer.kernels.memorizing_kernel import MemorizingKernel
from manyformer.kernels.pairwise_kernel import PairwiseKernel
from manyformer.kernels.routing_kernel import RoutingKernel
from manyformer.kernels.sinkhorn_kernel import SinkhornKernel
from manyformer.kernels.softmax_kernel import SoftmaxKernel

__all__ = [
    "DynamicRotaryKernel",
    "ForgettingKernel",
    "Kernel",
    "KernelCall",
    "LSHKernel",
    "LinearKernel",
    "LinformerKernel",
    "LolcatsKernel",
    "MemorizingKernel",
    "PairwiseKernel",
    "QKNormKernel",
    "RoutingKernel",
    "SinkhornKernel",
    "SoftmaxKernel",
    "SumKernel",
    "named_kernels",
]
