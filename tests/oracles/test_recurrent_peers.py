"""Layers of recurrent recipes: those of transformers with the same weights, else their formulas token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import manyformer as mf
from manyformer.nn import Attention
from manyformer.nn.core import Context, contiguous_positions

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

DIM, HEADS, LENGTH = 24, 4, 70


def built(recipe: str, layer: int = 0, **keywords: Any) -> Attention:
    """The attention of a layer, with perturbed weights."""
    torch.manual_seed(0)
    model = mf.build(recipe, vocab=11, dim=DIM, depth=2, heads=HEADS, **keywords)
    attention = model.get_submodule(f"body.{layer}.attention.inner")
    assert isinstance(attention, Attention)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return attention.eval()


def drawn() -> tuple[Tensor, Context]:
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1))
    return x, Context(contiguous_positions(2, 0, LENGTH, x.device))


def weight(layer: Attention, name: str) -> Tensor:
    return layer.get_parameter(name).detach()


def conv_weight(layer: Attention) -> Tensor:
    return weight(layer, "short_convolution.weight").T[:, None]


def load(theirs: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    theirs.load_state_dict(tensors, strict=True)
    theirs.eval()


def same(ours: Attention, theirs: Tensor) -> None:
    x, ctx = drawn()
    with torch.no_grad():
        y = ours(x, ctx).y
    assert y.abs().mean() > 1e-2
    torch.testing.assert_close(y, theirs, atol=2e-5, rtol=1e-4)


def test_gated_deltanet_is_that_of_olmo_hybrid() -> None:
    peer = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    layer = built("gated-deltanet", key_heads=2, head_dim=6, value_dim=10, negative_eigenvalues=True)
    config = peer.OlmoHybridConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        linear_num_key_heads=2,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        layer_types=["linear_attention", "full_attention"],
    )
    reference = peer.OlmoHybridGatedDeltaNet(config, 0)
    k, v = weight(layer, "kv_proj.weight").split([12, 40])
    gates = "kernel.rule.gate_projection"
    load(
        reference,
        {
            "q_proj.weight": weight(layer, "q_proj.weight"),
            "k_proj.weight": k,
            "v_proj.weight": v,
            "a_proj.weight": weight(layer, f"{gates}.decay.up.weight"),
            "b_proj.weight": weight(layer, f"{gates}.strength.up.weight"),
            "g_proj.weight": weight(layer, "output_stage.gate.up.weight"),
            "o_proj.weight": weight(layer, "out_proj.weight"),
            "conv1d.weight": conv_weight(layer),
            "A_log": weight(layer, "kernel.rule.decay.a_log"),
            "dt_bias": weight(layer, "kernel.rule.decay.dt_bias"),
            "o_norm.weight": weight(layer, "output_stage.norm.weight"),
        },
    )
    with torch.no_grad():
        same(layer, reference(drawn()[0]))


def test_gated_deltanet_is_that_of_qwen3_next() -> None:
    """Its projections are stored by key head: queries, keys, values and gates of one after the other."""
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer = built("gated-deltanet", key_heads=2, head_dim=6, value_dim=10)
    assert layer.output_stage is not None
    layer.output_stage.norm.eps = 1e-6  # type: ignore[union-attr]
    config = peer.Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        linear_num_key_heads=2,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        rms_norm_eps=1e-6,
        layer_types=["linear_attention", "full_attention"],
    )
    reference = peer.Qwen3NextGatedDeltaNet(config, 0)
    k, v = weight(layer, "kv_proj.weight").split([12, 40])
    gates = "kernel.rule.gate_projection"
    parts = [weight(layer, "q_proj.weight"), k, v, weight(layer, "output_stage.gate.up.weight")]
    by_head = [part.unflatten(0, (2, -1)) for part in parts]  # type: ignore[no-untyped-call]
    rates = [weight(layer, f"{gates}.{name}.up.weight").unflatten(0, (2, -1)) for name in ("strength", "decay")]  # type: ignore[no-untyped-call]
    load(
        reference,
        {
            "in_proj_qkvz.weight": torch.cat(by_head, 1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat(rates, 1).flatten(0, 1),
            "out_proj.weight": weight(layer, "out_proj.weight"),
            "conv1d.weight": conv_weight(layer),
            "A_log": weight(layer, "kernel.rule.decay.a_log"),
            "dt_bias": weight(layer, "kernel.rule.decay.dt_bias"),
            "norm.weight": weight(layer, "output_stage.norm.weight"),
        },
    )
    with torch.no_grad():
        same(layer, reference(drawn()[0]))


def test_kimi_delta_attention_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    layer = built("kda")
    config = peer.KimiLinearConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        linear_num_heads=HEADS,
        linear_head_dim=DIM // HEADS,
        layer_types=["linear_attention", "full_attention"],
    )
    reference = peer.KimiLinearDeltaAttention(config, 0)
    k, v = weight(layer, "kv_proj.weight").chunk(2)
    gates = "kernel.rule.gate_projection"
    load(
        reference,
        {
            "q_proj.weight": weight(layer, "q_proj.weight"),
            "k_proj.weight": k,
            "v_proj.weight": v,
            "conv1d.weight": conv_weight(layer),
            "forget_gate.f_a_proj.weight": weight(layer, f"{gates}.decay.down.weight"),
            "forget_gate.f_b_proj.weight": weight(layer, f"{gates}.decay.up.weight"),
            "forget_gate.A_log": weight(layer, "kernel.rule.decay.a_log").view(1, 1, -1, 1),
            "forget_gate.dt_bias": weight(layer, "kernel.rule.decay.dt_bias"),
            "b_proj.weight": weight(layer, f"{gates}.strength.up.weight"),
            "g_a_proj.weight": weight(layer, "output_stage.gate.down.weight"),
            "g_b_proj.weight": weight(layer, "output_stage.gate.up.weight"),
            "o_norm.weight": weight(layer, "output_stage.norm.weight"),
            "o_proj.weight": weight(layer, "out_proj.weight"),
        },
    )
    with torch.no_grad():
        same(layer, reference(drawn()[0]))


def test_mamba_2_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    layer = built("mamba-2", groups=2, state_dim=5)
    config = peer.Mamba2Config(
        hidden_size=DIM, num_hidden_layers=2, num_heads=HEADS, head_dim=12, state_size=5, n_groups=2, chunk_size=16
    )
    reference = peer.Mamba2Mixer(config, 0)
    k, v = weight(layer, "kv_proj.weight").split([10, 48])
    z, steps = weight(layer, "output_stage.gate.up.weight"), weight(layer, "kernel.rule.gate_projection.up.weight")
    # ours convolves queries, keys, values (C, B, x), theirs x, B, C
    q_conv, k_conv, v_conv = conv_weight(layer).split([10, 10, 48])
    q_bias, k_bias, v_bias = weight(layer, "short_convolution.bias").split([10, 10, 48])
    load(
        reference,
        {
            "in_proj.weight": torch.cat([z, v, k, weight(layer, "q_proj.weight"), steps]),
            "conv1d.weight": torch.cat([v_conv, k_conv, q_conv]),
            "conv1d.bias": torch.cat([v_bias, k_bias, q_bias]),
            "dt_bias": weight(layer, "kernel.rule.decay.dt_bias"),
            "A_log": weight(layer, "kernel.rule.decay.a_log"),
            "D": weight(layer, "kernel.rule.skip"),
            "norm.weight": weight(layer, "output_stage.norm.weight"),
            "out_proj.weight": weight(layer, "out_proj.weight"),
        },
    )
    with torch.no_grad():
        y = reference(drawn()[0])
        same(layer, y[0] if isinstance(y, tuple) else y)


def test_mlstm_is_that_of_xlstm() -> None:
    peer = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    layer = built("mlstm")
    with torch.no_grad():
        layer.get_parameter("kernel.rule.input_bias").normal_(std=2.0)
    config = peer.xLSTMConfig(hidden_size=DIM, num_heads=HEADS, autocast_kernel_dtype="float32")
    reference = peer.xLSTMLayer(config)
    k, v = weight(layer, "kv_proj.weight").split([12, 24])
    gates = "kernel.rule.gate_projection"
    load(
        reference,
        {
            "q.weight": weight(layer, "q_proj.weight"),
            "k.weight": k,
            "v.weight": v,
            "igate_preact.weight": weight(layer, f"{gates}.input.up.weight"),
            "igate_preact.bias": weight(layer, "kernel.rule.input_bias"),
            "fgate_preact.weight": weight(layer, f"{gates}.forget.up.weight"),
            "fgate_preact.bias": weight(layer, "kernel.rule.forget_bias"),
            "ogate_preact.weight": weight(layer, "output_stage.gate.up.weight"),
            "multihead_norm.weight": weight(layer, "output_stage.norm.weight"),
            "out_proj.weight": weight(layer, "out_proj.weight"),
        },
    )
    with torch.no_grad():
        same(layer, reference(drawn()[0])[0])


@pytest.mark.parametrize("number", [0, 1])
def test_lightning_attention_is_that_of_minimax(number: int) -> None:
    """The decays of a head differ from layer to layer; the weights are stored by head."""
    peer = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    layer = built("lightning", number)
    config = peer.MiniMaxConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        block_size=16,
        layer_types=["linear_attention", "linear_attention"],
    )
    reference = peer.MiniMaxLightningAttention(config, number)
    k, v = weight(layer, "kv_proj.weight").chunk(2)
    by_head = [part.unflatten(0, (HEADS, -1)) for part in (weight(layer, "q_proj.weight"), k, v)]  # type: ignore[no-untyped-call]
    slopes = {name: value for name, value in reference.state_dict().items() if "decay" in name or "slope" in name}
    load(
        reference,
        slopes
        | {
            "norm.weight": weight(layer, "output_stage.norm.weight"),
            "qkv_proj.weight": torch.cat(by_head, 1).flatten(0, 1),
            "out_proj.weight": weight(layer, "out_proj.weight"),
            "output_gate.weight": weight(layer, "output_stage.gate.up.weight"),
        },
    )
    with torch.no_grad():
        same(layer, reference(drawn()[0], None, torch.ones(2, LENGTH))[0])


def projected(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (b, h, l, .) without positions."""
    assert layer.q_proj is not None
    k, v = layer.kv_proj(x).split([layer.key_heads * layer.kv_shape.head_dim, HEADS * value_dim(layer)], -1)
    return tuple(part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (layer.q_proj(x), k, v))  # type: ignore[return-value]


def value_dim(layer: Attention) -> int:
    return layer.kv_shape.value_dim - layer.kernel.gate_dim


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """y_t = S_t^T q_t with S_t = diag(decay_t) S_(t-1) + k_t v_t^T, token by token."""
    memory, outputs = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        memory = decay[:, :, i, :, None] * memory + k[:, :, i, :, None] * v[:, :, i, None, :]
        outputs.append(torch.einsum("bhr,bhrf->bhf", q[:, :, i], memory))
    return torch.stack(outputs, 2)


def test_gated_linear_attention_is_its_formula() -> None:
    layer, (x, _) = built("gla"), drawn()
    with torch.no_grad():
        q, k, v = projected(layer, x)
        gate = layer.get_submodule("kernel.rule.gate_projection")
        logits = F.linear(gate.down(x), gate.up.weight, gate.up.bias)  # type: ignore[operator, union-attr]
        decay = torch.sigmoid(logits).pow(1 / 16).unflatten(2, (HEADS, -1)).transpose(1, 2)
        y = decayed(q / math.sqrt(q.shape[-1]), k, v, decay).transpose(1, 2)
        normed = F.rms_norm(y, (6,), weight(layer, "output_stage.norm.weight"), 1e-5)
        gated = normed.flatten(2) * F.silu(x @ weight(layer, "output_stage.gate.up.weight").T)
        same(layer, layer.out_proj(gated))


def test_retention_is_its_parallel_formula() -> None:
    """(Q K^T * D) V with D_ij = gamma^(i - j) (equation 5), over queries and keys rotated by rotary positions."""
    layer, (x, ctx) = built("retnet"), drawn()
    with torch.no_grad():
        q, k, v = projected(layer, x)
        q, k = layer.position.query(q, ctx.positions), layer.position.key(k, ctx.positions)
        gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS))
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        factor = torch.where(distance >= 0, gamma[:, None, None] ** distance, 0.0)
        y = (q @ k.mT / math.sqrt(q.shape[-1]) * factor) @ v
        normed = F.rms_norm(y.transpose(1, 2), (12,), eps=1e-5).flatten(2)
        same(layer, layer.out_proj(normed * F.silu(x @ weight(layer, "output_stage.gate.up.weight").T)))


def test_hgrn2_is_its_formula_with_bounds_above_the_first_layer() -> None:
    for number in (0, 1):
        layer, (x, _) = built("hgrn2", number), drawn()
        with torch.no_grad():
            q, forget, v = projected(layer, x)
            shares = weight(layer, "kernel.rule.bounds.logits").softmax(0)
            bound = (shares.cumsum(0) - shares[0])[number].view(HEADS, 1, -1)
            decay = bound + (1 - bound) * torch.sigmoid(forget)
            y = decayed(F.silu(q) / math.sqrt(q.shape[-1]), 1 - decay, v, decay).transpose(1, 2).flatten(2)
            normed = F.rms_norm(y, (DIM,), eps=1e-5) * weight(layer, "output_stage.norm.weight")
            same(layer, layer.out_proj(normed))


def test_deltanet_is_its_formula() -> None:
    """Equation 3 of the paper, with matrices I - b k k^T."""
    layer, (x, ctx) = built("deltanet"), drawn()
    with torch.no_grad():
        assert layer.q_proj is not None
        assert layer.short_convolution is not None
        mixed, _ = layer.short_convolution([layer.q_proj(x), layer.kv_proj(x)], ctx.positions, None)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in torch.cat(mixed, -1).chunk(3, -1))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        strength = torch.sigmoid(x @ weight(layer, "kernel.rule.gate_projection.strength.up.weight").T).mT
        memory, outputs = torch.zeros(2, HEADS, 6, 6), []
        for i in range(LENGTH):
            b, key = strength[:, :, i, None, None], k[:, :, i, :, None]
            memory = (torch.eye(6) - b * key * key.mT) @ memory + b * key * v[:, :, i, None, :]
            outputs.append((q[:, :, i, None] @ memory)[:, :, 0] / math.sqrt(6))
        y = F.rms_norm(torch.stack(outputs, 1), (6,), weight(layer, "output_stage.norm.weight"), 1e-5)
        same(layer, layer.out_proj(y.flatten(2)))
