"""Attention alone, forward and backward in bfloat16: torch's kernels, ours, and those of fla where it is installed."""

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, list_flash_attention_impls, sdpa_kernel

from gpu_parts.flex_paths import row_positions
from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.analysis.benchmarks import take_turns
from manyformer.nn import Kernel, KernelCall, LinearKernel, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.linear import EluPlusOneFeatures
from manyformer.nn.positions import AlibiPosition, NoPosition
from manyformer.nn.softmax.flex_attention import block_mask, fused_flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

ROUNDS = 5
FLEX_SHARE = 0.85
"""Compiled FlexAttention reaches this share of FlashAttention's speed."""
LINEAR_FROM = 4096
"""Linear attention is ahead of SDPA from this length on."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLA_OPERATORS = {
    "fla linear": ("fla.ops.linear_attn", "chunk_linear_attn"),
    "fla retention": ("fla.ops.retention", "chunk_retention"),
}


def items(setting: Setting) -> dict[str, Item]:
    """Each length, with as many tokens in all."""
    lengths = (64, 128) if setting.tiny else (1024, 4096, 16384)
    return {f"{length} tokens": partial(contest, setting, length) for length in lengths}


def contest(setting: Setting, length: int) -> Outcome:
    """All candidates in turns; TFLOP/s count the visible half of causal pairs."""
    batch, heads, width = (1, 2, 16) if setting.tiny else (max(1, 16384 // length), 16, 64)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    q, k, v = (
        torch.randn(batch, heads, length, width, device=setting.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    upstream = torch.randn_like(q)
    jobs, absent, paths = {}, [], []
    for name, attend in candidates(setting, q, paths).items():
        job = partial(_forward_backward, attend, (q, k, v), upstream)
        try:
            job()
        except (RuntimeError, ImportError) as error:
            absent.append(f"{name}: {str(error).strip().partition(chr(10))[0][:120] or type(error).__name__}")
            continue
        jobs[name] = job
    times = {name: statistics.median(seconds) for name, seconds in take_turns(jobs, ROUNDS, setting.device).items()}
    # 2 products forward, 5 backward, of the visible half of all pairs
    flops = 7 * batch * heads * length * length * width
    numbers = {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}
    numbers |= {f"{name}, TFLOP/s": flops / times[name] / 1e12 for name in times if not name.startswith(("our", "fla"))}
    misses = goals(times, length) if setting.has_goals else []
    sentence = f"{len(jobs)} candidates, batch {batch}, {heads} heads of {width}"
    return judged("; ".join([sentence, *(f"not run, {reason}" for reason in absent)]), misses, numbers, paths)


def goals(times: dict[str, float], length: int) -> list[str]:
    """The goals that these seconds miss."""
    misses = []
    if "flash" in times and "flex" in times and times["flash"] / times["flex"] < FLEX_SHARE:
        misses.append(f"flex has {times['flash'] / times['flex']:.2f} of FlashAttention's speed, goal {FLEX_SHARE}")
    if length >= LINEAR_FROM and times["our linear"] >= times["sdpa"]:
        misses.append(f"linear takes {times['our linear'] / times['sdpa']:.2f} of SDPA's time, goal below 1")
    return misses


def candidates(setting: Setting, q: Tensor, paths: list[str]) -> dict[str, Attend]:
    """Functions of queries, keys and values by name; `paths` collects those that our kernels take."""
    functions: dict[str, Attend] = {"sdpa": partial(F.scaled_dot_product_attention, is_causal=True)}
    kernels: dict[str, tuple[Kernel, AlibiPosition | NoPosition]] = {
        "our dense": (SoftmaxKernel(m.Causal()), NoPosition()),
        "our window 256": (SoftmaxKernel(m.Causal() & m.Window(256)), NoPosition()),
        "our alibi": (SoftmaxKernel(m.Causal()), AlibiPosition(q.shape[1])),
        "our linear": (LinearKernel(EluPlusOneFeatures(), m.Causal()), NoPosition()),
    }
    positions = row_positions(None, q.shape[2], q.device)
    for name, (kernel, position) in kernels.items():
        position.to(q.device)
        paths.append(f"{name}: {kernel.explain(KernelCall(q, q, q, positions, positions, position))}")
        functions[name] = lambda q, k, v, kernel=kernel, position=position: (
            kernel(  # type: ignore[misc]
                KernelCall(q, k, v, positions, positions, position)
            ).y
        )
    if not setting.on_gpu:
        return functions
    blocks = block_mask(m.Causal(), positions, positions, q.shape[1])
    functions["flex"] = lambda q, k, v: fused_flex_attention(q, k, v, block_mask=blocks, scale=q.shape[-1] ** -0.5)
    functions |= {name: partial(_with_backend, backend) for name, backend in BACKENDS.items()}
    functions |= {name: partial(_with_flash, name) for name in list_flash_attention_impls()}
    return functions | {name: partial(_with_fla, *operator) for name, operator in FLA_OPERATORS.items()}


def _forward_backward(attend: Attend, tensors: tuple[Tensor, ...], upstream: Tensor) -> None:
    torch.autograd.grad(attend(*tensors), tensors, upstream)


def _with_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _with_flash(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention 3 or 4, where its package is installed: it is activated for this call."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl(implementation)
    try:
        return _with_backend(SDPBackend.FLASH_ATTENTION, q, k, v)
    finally:
        restore_flash_attention_impl()


def _with_fla(module: str, operator: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if importlib.util.find_spec("fla") is None:
        raise ImportError("fla is not installed (pip install flash-linear-attention)")
    attend = getattr(importlib.import_module(module), operator)
    # tokens before heads there
    y: Tensor = attend(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))[0]
    return y.transpose(1, 2)
