"""Operations with gradients of their own are traced by torch.compile without a break in the graph."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from manyformer.nn.runtime.length_norms import rms_norm, unit_length
from manyformer.nn.linear.matrix_recurrence import Removal, chunked
from manyformer.nn.convolution.depthwise_convolution import convolve_rows
from manyformer.nn.recurrent.rwkv_time_mixing import mix_tokens

def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)

def recurrence(form, width):
    q, k, u, v = (draw(2, 3, 40, 5) for _ in range(4))
    decay = -torch.rand(2, 3, 40, width, dtype=torch.float64) if width else None
    run = (torch.arange(40) // 23).expand(2, -1)
    options = {"delta": {"strength": draw(2, 3, 40).sigmoid().detach()}, "removal": {"removal": Removal(k, u * 0.1)}}
    return lambda: chunked(q, k * 0.3, v, decay, run, chunk=16, **options.get(form, {})).y, [q, k, v]

x, other, weight = draw(2, 40, 6), draw(2, 40, 6), draw(4, 6)
CASES = {
    "rms_norm": (lambda: rms_norm(x, weight[0]), [x, weight]),
    "unit_length": (lambda: unit_length(x, eps=1e-6), [x]),
    "convolve_rows": (lambda: convolve_rows(x, weight, causal=True), [x, weight]),
    "mix_tokens": (lambda: torch.stack(list(mix_tokens(x, other, weight))), [x, other, weight]),
    **{f"{form} {width}": recurrence(form, width) for form in ("decay", "delta", "removal") for width in (0, 1, 5)},
}
call, leaves = CASES[sys.argv[1]]
compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
actual, expected = (function() for function in (compiled, call))
torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected))
torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
print("one graph")
"""
RECURRENCES = [f"{form} {width}" for form in ("decay", "delta", "removal") for width in (0, 1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rms_norm", "unit_length", "convolve_rows", "mix_tokens", *RECURRENCES])
def test_it_is_one_graph_with_the_same_gradients(case: str) -> None:
    """In a process of its own, where shapes are not checked: that cannot be traced."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, case], capture_output=True, text=True, check=False)
    assert done.stdout == "one graph\n", done.stderr[-2000:]
