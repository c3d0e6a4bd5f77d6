"""The compiled paths against the definition, with gradients, at lengths beside the multiples of a block."""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_parts.outcome import Item, Outcome, Setting, judged, relative_error
from manyformer.models.embedding import positions_of
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.positions import AlibiPosition, NoPosition, Position, T5BiasPosition

HEADS, WIDTH = 4, 64
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Of outputs and gradients, as shares of the largest; the compiled float32 products may use TF32."""


class FlexCase(NamedTuple):
    """A mask, a position, and the documents of the only row; -1 is padding."""

    mask: m.Mask
    position: Callable[[], Position] = NoPosition
    documents: Callable[[int], list[int]] | None = None
    kv_heads: int = HEADS


def packed(length: int) -> list[int]:
    """Two documents and padding."""
    return [0] * (length // 3) + [1] * (length // 2) + [-1] * (length - length // 3 - length // 2)


def t5_bias() -> T5BiasPosition:
    """A learned bias, whose gradients are compared too."""
    return T5BiasPosition(HEADS, buckets=32, max_distance=128, direction="past")


CASES = {
    "window": FlexCase(m.Causal() & m.Window(256)),
    "window, both sides": FlexCase(m.Window(256)),
    "window, grouped queries": FlexCase(m.Causal() & m.Window(256), kv_heads=2),
    "heads apart": FlexCase(
        m.Causal() & m.PerHead({0: m.Window(64), 1: m.Window(200), 2: m.AllKeys(), 3: m.Window(9)})
    ),
    "global tokens": FlexCase(m.Causal() & (m.Window(128) | m.GlobalTokens(m.FirstTokens(4)))),
    "packed causal": FlexCase(m.Causal(), documents=packed),
    "packed window": FlexCase(m.Causal() & m.Window(100), documents=packed),
    "alibi": FlexCase(m.Causal(), lambda: AlibiPosition(HEADS)),
    "t5 bias": FlexCase(m.Causal(), t5_bias),
}


def items(setting: Setting) -> dict[str, Item]:
    """Each case at each length and precision."""
    lengths = (65,) if setting.tiny else (1025, 1024)
    dtypes = [torch.float32] if setting.tiny else list(TOLERANCES)
    return {
        f"{name}, {length} tokens, {str(dtype).removeprefix('torch.')}": partial(compare, setting, case, length, dtype)
        for length, dtype, (name, case) in itertools.product(lengths, dtypes, CASES.items())
    }


def row_positions(documents: list[int] | None, length: int, device: torch.device) -> TokenPositions:
    """The positions of one row of these documents, or of one document."""
    if documents is None:
        position_ids = torch.arange(length, device=device)[None]
        return TokenPositions(position_ids, torch.zeros_like(position_ids), ContiguousLayout())
    numbers = torch.tensor([documents], device=device)
    return positions_of(numbers.clamp(min=0), numbers, None)[0]


def compare(setting: Setting, case: FlexCase, length: int, dtype: torch.dtype) -> Outcome:
    """Outputs, and on a GPU gradients, of the compiled path in `dtype` against the definition in float64."""
    torch.manual_seed(0)
    documents = None if case.documents is None else case.documents(length)
    positions = row_positions(documents, length, setting.device)
    is_token = positions.segment_ids[0] >= 0
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, case.kv_heads, case.kv_heads)]
    tensors = [torch.randn(*shape, device=setting.device, dtype=dtype) for shape in shapes]
    upstream = torch.randn(1, HEADS, length, WIDTH, device=setting.device)[:, :, is_token]
    position = case.position().to(setting.device)
    results: dict[str, list[Tensor]] = {}
    with_gradients = setting.on_gpu
    for path, kind in (("naive", torch.float64), ("flex", dtype)):
        kernel = SoftmaxKernel(case.mask, path=path)
        weights = list(position.to(kind if path == "naive" else torch.float32).parameters())
        leaves = [x.to(kind).requires_grad_(with_gradients) for x in tensors]
        with torch.set_grad_enabled(with_gradients), warnings.catch_warnings():
            # on a CPU the eager form is what is tested
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            call = KernelCall(*leaves, positions, positions, position)
            y = kernel(call).y[:, :, is_token]
        gradients = []
        if with_gradients:
            gradients = list(torch.autograd.grad((y.to(upstream.dtype) * upstream).sum(), [*leaves, *weights]))
        results[path] = [y, *gradients]
        explanation = kernel.explain(call)
    errors = [relative_error(actual, expected) for actual, expected in zip(results["flex"], results["naive"])]
    tolerance, worst = TOLERANCES[dtype], max(errors, key=lambda error: (error != error, error))
    misses = [] if worst <= tolerance else [f"{worst:.1e} is more than {tolerance:.0e}"]
    compared = "outputs and gradients" if with_gradients else "outputs alone (FlexAttention has no gradient on a CPU)"
    return judged(f"{compared} agree with the definition to {worst:.1e}", misses, {"error": worst}, [explanation])
