"""Autocast as CUDA has it, for pretended tensors.

Its kernels in torch look whether a tensor is on "cuda" for C++, which no pretended tensor is. These take their places,
for the operators for which torch has such kernels, and cast as torch's page on autocast says. They stay for the
process: they would serve the tensors of a real GPU as well.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

KEY = torch._C.DispatchKey.AutocastCUDA

LOWER_PRECISION = {
    *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu"),
    *("addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm"),
    *("chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
    *("rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
}
"""Operators that compute in bfloat16 or float16."""

WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
}
"""Operators that compute in the widest precision of their tensors."""

LEFT_ALONE = {"_cudnn_rnn", "binary_cross_entropy"}
"""Operators that the package does not call: a library's own, and one that autocast refuses."""

# All others that torch has a kernel for compute in float32.


@functools.cache
def register_autocast() -> torch.library.Library:
    """Put these kernels in the places of torch's, once."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            packet_name, _, overload = name.partition(".")
            has_kernel = namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(full_name, KEY.name)
            if has_kernel and packet_name not in LEFT_ALONE:
                operator = getattr(getattr(torch.ops.aten, packet_name), overload or "default")
                library.impl(operator, _kernel(operator, packet_name), KEY.name)
    return library


def _kernel(operator: Any, name: str) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(KEY)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cuda"):
            dtype = _precision(name, args, kwargs)
            args, kwargs = tree_map(lambda leaf: _cast(leaf, dtype), (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*args, **kwargs)

    return call


def _precision(name: str, args: Any, kwargs: Any) -> torch.dtype:
    if name in LOWER_PRECISION:
        return torch.get_autocast_dtype("cuda")
    if name in WIDEST:
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_eligible(leaf)}
        return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
    return torch.float32


def _is_eligible(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda and leaf.is_floating_point() and leaf.dtype != torch.float64


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if _is_eligible(leaf) else leaf
