"""LoLCATs attention: windows and sums give what the definition gives, in any layout, whole and as a stream."""

from typing import Any

import pytest
import torch

import manyformer as mf
from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, in_steps, place_of, real_of, tensors
from manyformer.nn import KernelCall, LolcatsKernel
from manyformer.nn.core import PADDING_SEGMENT, state_bytes
from manyformer.nn.positions import NoPosition

HEADS, KEY, VALUE, WINDOW = 4, 6, 5, 4
NOWHERE = NoPosition()


def kernel(path: Any = "auto", *, groups: int = 2, window: int = WINDOW) -> LolcatsKernel:
    torch.manual_seed(0)
    built = LolcatsKernel(KEY, heads=HEADS, kv_heads=groups, window=window, path=path).double()
    for parameter in built.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    return built


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_definition_itself(layout: str, groups: int) -> None:
    """Zhang et al. 2024, section 3.3.1, one query of one head at a time."""
    place, naive = place_of(layout), kernel("naive", groups=groups)
    q, k, v = (x.detach() for x in tensors(HEADS, groups, KEY, VALUE))
    y = naive(KernelCall(q, k, v, place, place, NOWHERE)).y
    gamma = naive.window_factor.sigmoid()
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (ROWS, LENGTH, HEADS))).tolist():
        g, segments = h // (HEADS // groups), place.segment_ids[b]
        if segments[i] == PADDING_SEGMENT:
            continue
        seen = [j for j in range(i + 1) if segments[j] == segments[i]]
        far, near = seen[:-WINDOW], seen[-WINDOW:]
        scores = k[b, g, near] @ q[b, h, i] / KEY**0.5
        x, z = naive.features.weight[h] @ q[b, h, i], k[b, g, far] @ naive.key_features.weight[g].T
        products = z.softmax(-1) @ x.softmax(-1) + (-z).softmax(-1) @ (-x).softmax(-1)
        weights = torch.cat([products, gamma[h] * (scores - scores.max()).exp()])
        torch.testing.assert_close(y[b, h, i], weights @ v[b, g, seen] / weights.sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [1, WINDOW, 30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_sums_are_the_definition(layout: str, window: int) -> None:
    place, real, qkv = place_of(layout), real_of(layout), tensors(HEADS, 2, KEY, VALUE)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real

    def run(path: str) -> tuple[torch.Tensor, ...]:
        streaming = kernel(path, window=window)
        y = streaming(KernelCall(*qkv, place, place, NOWHERE)).y * real
        # a window of all tokens is softmax, which depends on none of them
        parameters = [] if window == 30 else list(streaming.parameters())
        return differentiated(y, grad_output, [*qkv, *parameters])

    assert apart(run("windows"), run("naive")) < 1e-10


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 1, 9, 8], [LENGTH]], ids=["steps", "pieces", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_gives_what_one_pass_gives(layout: str, sizes: list[int]) -> None:
    built, place, real = kernel(), place_of(layout), real_of(layout)
    q, k, v = (x.detach() for x in tensors(HEADS, 2, KEY, VALUE))
    state, outputs = built.init_state(ROWS, device=q.device, dtype=q.dtype), []
    for part, at in in_steps(layout, sizes):
        y, state, _ = built(KernelCall(q[:, :, part], k[:, :, part], v[:, :, part], at, at, NOWHERE, state))
        outputs.append(y)
    full = built(KernelCall(q, k, v, place, place, NOWHERE)).y
    assert apart((torch.cat(outputs, 2) * real,), (full * real,)) < 1e-10


def test_the_state_is_one_window_and_a_matrix_whatever_was_read() -> None:
    model = mf.build("llama", vocab=20, dim=16, depth=1, heads=2, kernel="lolcats", window=4).eval()
    with torch.no_grad():
        sizes = {state_bytes(model(torch.zeros(1, n).long(), state=model.init_state(1)).state) for n in (8, 30, 60)}
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"window": 0}, r"window \(0\) must be at least 1"), ({"path": "fast"}, "path 'fast' does not exist")],
)
def test_an_empty_window_and_an_unknown_path_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LolcatsKernel(4, heads=1, kv_heads=1, **settings)
