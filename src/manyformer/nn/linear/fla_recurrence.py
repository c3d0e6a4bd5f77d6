"""Recurrences of memory matrices by the Triton kernels of the package fla-core, on a GPU, in half precision.

`matrix_recurrence` defines what they compute. Here are the differences of the interfaces: heads come after tokens
there, scores are scaled unless the scale is 1, and the documents of packed rows are given by where they begin.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.linear.matrix_recurrence import RecurrenceResult
from manyformer.nn.runtime.devices import compiles_attention, device_kind

PACKAGE = "fla"
DTYPES = (torch.bfloat16, torch.float16)
HOPPER = 9
"""The capability of the GPUs of that architecture."""

MAX_KEY_DIM = 256
"""The largest width of keys for which all of these kernels exist."""

OPERATORS = {
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_gla": "fla.ops.gla",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
}
"""The operators and their modules."""


class DocumentStarts(NamedTuple):
    """Documents of packed rows, in order: where each begins and the last ends, and whether it continues a memory.

    `rows` is the row of each, `last` the last document of each row."""

    offsets: Int[Tensor, " n1"]
    continues: Float[Tensor, " n"]
    rows: Int[Tensor, " n"]
    last: Int[Tensor, " b"]


def fla_refusal(device: torch.device, dtype: torch.dtype, key_dim: int, *, has_decay_per_head: bool) -> str | None:
    """Why the package does not serve heads of this width and type and this kind of recurrence; None if it does."""
    if not compiles_attention(device):
        return f"fla-core needs a GPU, not the device {device.type}"
    if torch.compiler.is_compiling():
        return "fla-core would break the compiled graph"
    if not is_installed():
        return "fla-core is not installed (pip install 'manyformer[fla]')"
    if dtype not in DTYPES:
        return f"fla-core computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if key_dim > MAX_KEY_DIM:
        return f"fla-core serves keys of at most {MAX_KEY_DIM} channels, not {key_dim}"
    # without gradients the forward kernels are right there as well
    if has_decay_per_head and torch.is_grad_enabled() and _has_wrong_head_decay_gradients(device):
        return "fla-core has no right gradients of decays per head here: with Triton 3.7.1 or tilelang it has"
    return None


def _has_wrong_head_decay_gradients(device: torch.device) -> bool:
    """Whether Triton compiles their kernel wrongly (fla-core's issue 640), which the package refuses to run.

    That is so on GPUs of compute capability 9, from Triton 3.4.0 to 3.7.0, unless tilelang compiles it."""
    return device_kind(device).capability(device) == HOPPER and _triton_is_wrong_on_hopper()


@lru_cache(maxsize=1)
def _triton_is_wrong_on_hopper() -> bool:
    if importlib.util.find_spec("tilelang") is not None:
        return False
    try:
        release = re.match(r"(\d+)\.(\d+)\.(\d+)", version("triton"))
    except PackageNotFoundError:
        return False
    return release is not None and (3, 4, 0) <= tuple(map(int, release.groups())) < (3, 7, 1)


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def operator_name(decay_dim: int | None, *, corrects: bool) -> str:
    """The operator for decays of so many channels (None: no decay), with the delta rule or without."""
    if not corrects:
        if decay_dim is not None and decay_dim > 1:
            return "chunk_gla"
        return "chunk_simple_gla"
    if decay_dim is None:
        return "chunk_delta_rule"
    if decay_dim == 1:
        return "chunk_gated_delta_rule"
    return "chunk_kda"


def load_operator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator of the package."""
    operator: Callable[..., tuple[Tensor, Tensor]] = getattr(importlib.import_module(OPERATORS[name]), name)
    return operator


def chunked(
    q: Float[Tensor, "b h l r"],
    k: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l #r"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    strength: Float[Tensor, "b h l"] | None = None,
    dtype: torch.dtype,
) -> RecurrenceResult:
    """`matrix_recurrence.chunked` with products of tensors of this `dtype`; decays and memories are of float32."""
    name = operator_name(None if decay is None else decay.shape[-1], corrects=strength is not None)
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if strength is not None:
        inputs["beta"] = strength.to(dtype)
    if decay is not None:
        # one number of a head has no axis of channels there
        inputs["g"] = (decay if decay.shape[-1] > 1 else decay[..., 0]).float()
    inputs = {key: x.transpose(1, 2) for key, x in inputs.items()}
    arguments: dict[str, Any] = {}
    starts = None if run is None else document_starts(run)
    initial = None if memory is None else memory.float()
    if starts is not None:
        # rows end to end as one row of many documents: the only form in which the package knows where documents begin
        inputs = {key: x.flatten(0, 1)[None] for key, x in inputs.items()}
        arguments["cu_seqlens"] = starts.offsets
        if initial is not None:
            initial = initial[starts.rows] * starts.continues[:, None, None, None]
    inputs = {key: x.contiguous() for key, x in inputs.items()}
    y, final = load_operator(name)(**inputs, scale=1.0, initial_state=initial, output_final_state=True, **arguments)
    if starts is not None:
        y, final = y[0].unflatten(0, (q.shape[0], -1)), final[starts.last]  # type: ignore[no-untyped-call]
    return RecurrenceResult(y.transpose(1, 2), final)


def document_starts(run: Int[Tensor, "b l"]) -> DocumentStarts:
    """Where the runs of all rows begin, with the rows end to end; reading it waits for a GPU."""
    rows, length = run.shape
    begins = F.pad(run.diff(dim=1) != 0, (1, 0), value=True)
    offsets = begins.flatten().nonzero()[:, 0]
    row_of_run = offsets // length
    count = begins.sum(1)
    # run 0 continues the memory of the previous call, and only at the beginning of a row
    continues = (run.flatten()[offsets] == 0) & (offsets % length == 0)
    return DocumentStarts(
        F.pad(offsets, (0, 1), value=rows * length), continues.float(), row_of_run, count.cumsum(0) - 1
    )
