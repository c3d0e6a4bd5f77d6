"""The parts of recurrent layers around a kernel: own gate projections, short convolutions, key heads, output stages."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layouts import LAYOUTS, ROWS, in_steps, place_of, real_of
from manyformer.nn import Attention, LinearKernel, SoftmaxKernel
from manyformer.nn.attention.head_gates import gated_heads
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.attention.output_stages import GatedNormStage, HeadGroupNorm, SharedHeadNorm
from manyformer.nn.convolution.depthwise_convolution import ShortConvolution
from manyformer.nn.core import Context
from manyformer.nn.linear import EluPlusOneFeatures
from manyformer.nn.linear.memory_rules import GatedRule
from manyformer.nn.masks import Causal
from manyformer.nn.runtime.head_selection import HeadProjection

DIM, HEADS, WIDTH = 12, 4, 3


def own_gates(*, rank: int | None = None) -> GatedRule:
    rule = GatedRule()
    rule.gate_projection = HeadProjection(DIM, HEADS, 1, rank=rank, bias=True)
    return rule


def make(**parts: Any) -> Attention:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "short_convolution": ShortConvolution(3 * DIM, bias=True),
        "output_stage": GatedNormStage(SharedHeadNorm(WIDTH), HeadProjection(DIM, HEADS, WIDTH, rank=2)),
        **parts,
    }
    kernel = LinearKernel(EluPlusOneFeatures(), Causal(), rule=own_gates(rank=2), chunk=4)
    return Attention(DIM, HEADS, kernel, **options).double()


@pytest.mark.parametrize("sizes", [[1] * 23, [5, 1, 9, 8]], ids=["steps", "chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_gives_what_one_pass_gives(layout: str, sizes: list[int]) -> None:
    layer, place, real = make(), place_of(layout), real_of(layout)[:, 0]
    x = torch.randn(ROWS, 23, DIM, dtype=torch.float64)
    state, outputs = layer.init_state(ROWS, device=x.device, dtype=x.dtype), []
    with torch.no_grad():
        for columns, positions in in_steps(layout, sizes):
            y, state, _ = layer(x[:, columns], Context(positions), state)
            outputs.append(y)
        expected = layer(x, Context(place)).y
    torch.testing.assert_close(torch.cat(outputs, 1) * real, expected * real, atol=1e-10, rtol=0)


def test_the_convolution_is_its_formula_over_the_tokens_of_a_document() -> None:
    convolution = ShortConvolution(5, bias=True).double()
    assert convolution.bias is not None
    place, segments = place_of("packed"), place_of("packed").segment_ids
    x = torch.randn(ROWS, 23, 5, dtype=torch.float64)
    (y,), _ = convolution([x], place, None)
    for row in range(ROWS):
        for i in range(23):
            taps = [j for j in range(max(0, i - 3), i + 1) if segments[row, j] == segments[row, i]]
            total = sum((convolution.weight[3 + j - i] * x[row, j] for j in taps), torch.zeros(5, dtype=x.dtype))
            if segments[row, i] >= 0:
                torch.testing.assert_close(y[row, i], F.silu(total + convolution.bias), atol=1e-12, rtol=0)


def test_gates_are_projected_from_the_input_that_is_not_convolved() -> None:
    """Written out: the gates of this layer, given to one whose values are projected with their gates."""
    layer, place = make(output_stage=None), place_of("plain")
    x = torch.randn(ROWS, 23, DIM, dtype=torch.float64)
    assert layer.q_proj is not None
    assert layer.short_convolution is not None
    mixed, _ = layer.short_convolution([layer.q_proj(x), layer.kv_proj(x)], place, None)
    q, k, v = (part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for part in torch.cat(mixed, -1).chunk(3, -1))
    gates = layer.kernel.gate_projection(x)  # type: ignore[misc]
    assert gates.shape == (ROWS, HEADS, 23, 1)
    decay = torch.sigmoid(gates[..., 0] + 2.0)
    q, k = (torch.where(part > 0, part + 1, part.exp()) for part in (q, k))
    memory, expected = torch.zeros(ROWS, HEADS, WIDTH, WIDTH + 1, dtype=x.dtype), []
    for i in range(23):
        g = decay[:, :, i, None, None]
        memory = g * memory + (1 - g) * k[:, :, i, :, None] * F.pad(v[:, :, i, None], (0, 1), value=1.0)
        read = (q[:, :, i, None] @ memory)[:, :, 0]
        expected.append(read[..., :-1] / read[..., -1:])
    y = torch.stack(expected, 1).flatten(2)
    torch.testing.assert_close(layer(x, Context(place)).y, layer.out_proj(y), atol=1e-10, rtol=0)


def test_adjacent_heads_share_the_queries_and_keys_of_a_key_head() -> None:
    layer = make(key_heads=2, short_convolution=None)
    shared = make(short_convolution=None)
    assert layer.q_proj is not None
    assert shared.q_proj is not None
    assert layer.q_proj.weight.shape == (6, DIM)
    assert layer.kv_proj.weight.shape == (6 + DIM, DIM)
    repeat = torch.arange(6).view(2, 1, WIDTH).expand(2, 2, WIDTH).flatten()
    with torch.no_grad():
        for name in ("weight", "bias"):
            keys, values = getattr(layer.kv_proj, name).split([6, DIM])
            getattr(shared.q_proj, name).copy_(getattr(layer.q_proj, name)[repeat])
            getattr(shared.kv_proj, name).copy_(torch.cat([keys[repeat], values]))
            getattr(shared.out_proj, name).copy_(getattr(layer.out_proj, name))
    shared.kernel.load_state_dict(layer.kernel.state_dict())
    assert shared.output_stage is not None
    assert layer.output_stage is not None
    shared.output_stage.load_state_dict(layer.output_stage.state_dict())
    x, ctx = torch.randn(ROWS, 23, DIM, dtype=torch.float64), Context(place_of("packed"))
    torch.testing.assert_close(layer(x, ctx).y, shared(x, ctx).y, atol=1e-12, rtol=0)


def test_heads_can_be_removed_with_their_gates_channels_and_norms() -> None:
    stage = GatedNormStage(
        HeadGroupNorm(HEADS, WIDTH, HEADS, centred=True, bias=True), HeadProjection(DIM, HEADS, WIDTH)
    )
    layer = make(output_stage=stage)
    x, ctx = torch.randn(ROWS, 23, DIM, dtype=torch.float64), Context(place_of("left padding"))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        holder = nn.ModuleDict({"attention": layer})
        with gated_heads(holder, {"attention": torch.tensor([0.0, 1.0, 0.0, 1.0])}):
            expected = layer(x, ctx).y
        pruned = copy.deepcopy(layer)
        pruned.keep_heads([1, 3])
        torch.testing.assert_close(pruned(x, ctx).y, expected, atol=1e-12, rtol=0)


def test_a_norm_over_several_heads_is_that_of_torch_and_none_of_them_can_be_removed() -> None:
    y, norm = torch.randn(2, HEADS, 5, WIDTH), HeadGroupNorm(HEADS, WIDTH, 2)
    nn.init.normal_(norm.weight)
    rows: Tensor = y.transpose(1, 2).reshape(2, 5, 2, 6)
    expected = F.rms_norm(rows, (6,), eps=1e-5).flatten(2) * norm.weight
    torch.testing.assert_close(norm(y).transpose(1, 2).flatten(2), expected)
    layer = make(output_stage=GatedNormStage(norm))
    with pytest.raises(ValueError, match="several heads together"):
        layer.keep_heads([0, 1])


def test_a_gate_before_the_norm_is_another_stage_than_one_after_it() -> None:
    y, x, gate = torch.randn(2, HEADS, 5, WIDTH), torch.randn(2, 5, DIM), HeadProjection(DIM, HEADS, WIDTH)
    norm = SharedHeadNorm(WIDTH)
    factor = F.silu(gate.up(x)).view(2, 5, HEADS, WIDTH).transpose(1, 2)
    torch.testing.assert_close(GatedNormStage(norm, gate)(y, x), F.rms_norm(y, (WIDTH,), eps=1e-5) * factor)
    first = GatedNormStage(norm, gate, gate_first=True)(y, x)
    torch.testing.assert_close(first, F.rms_norm(y * factor, (WIDTH,), eps=1e-5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_heads": 3}, "multiple of key_heads"),
        ({"key_heads": 2, "kv_heads": 1}, "without kv_heads"),
        ({"source": CrossAttentionSource()}, "needs self-attention"),
    ],
)
def test_parts_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
    kernel = LinearKernel(EluPlusOneFeatures(), Causal(), rule=GatedRule())
    with pytest.raises(ValueError, match="must not be convolved"):
        Attention(DIM, HEADS, kernel, short_convolution=ShortConvolution(3 * DIM + HEADS))


def test_softmax_attention_has_an_output_gate_like_that_of_qwen3_next() -> None:
    stage = GatedNormStage(gate=HeadProjection(DIM, HEADS, WIDTH), activation=torch.sigmoid)
    layer = Attention(DIM, HEADS, SoftmaxKernel(Causal()), kv_heads=2, output_stage=stage)
    ungated = copy.deepcopy(layer)
    ungated.output_stage, ungated.out_proj = None, nn.Identity()
    x, ctx = torch.randn(ROWS, 23, DIM), Context(place_of("plain"))
    assert stage.gate is not None
    expected = layer.out_proj(ungated(x, ctx).y * torch.sigmoid(stage.gate.up(x)))
    torch.testing.assert_close(layer(x, ctx).y, expected)
