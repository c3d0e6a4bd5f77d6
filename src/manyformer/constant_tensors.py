"""Numbers that never change, as tensors that are copied to each device once."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manyformer.torch_internals import constant_for_compiler

MAX_CONSTANTS = 1024
"""The most recent constants are kept; they are small."""


@constant_for_compiler
def constant_tensor(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, numbers or tuples of them, as a tensor on `device`; nobody may write into it.

    A tensor made of a list is copied from the host at each call, and a GPU waits for that. A graph that is being
    compiled holds this one as a constant."""
    return _kept_tensor(values, dtype, device)


@lru_cache(maxsize=MAX_CONSTANTS)
def _kept_tensor(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # a tensor that is made in inference mode could not be used in training later
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype, device=device)
