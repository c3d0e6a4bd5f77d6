"""Hybrid language models as a whole: the logits of transformers' classes with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn.convolution.gated_convolution import GatedConvolution
from manyformer.nn.core import Context, contiguous_positions

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

VOCAB, DIM, HEADS, LENGTH = 13, 24, 4, 21
EAGER: dict[str, Any] = {"attn_implementation": "eager", "vocab_size": VOCAB, "hidden_size": DIM, "pad_token_id": None}

Weights = dict[str, Tensor]


def tensors_of(model: nn.Module) -> Weights:
    """The weights of a model of transformers, none of which is left at a value that hides a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    return dict(model.state_dict())


def part(hf: Weights, prefix: str) -> Weights:
    """The tensors below a prefix."""
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in hf.items() if name.startswith(f"{prefix}.")}


def under(prefix: str, tensors: Weights) -> Weights:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def convolution(weight: Tensor, rows: list[int], order: list[int]) -> Tensor:
    """The weight of a depthwise convolution, its channels in another order of their parts."""
    parts = weight[:, 0].split(rows)
    return torch.cat([parts[index] for index in order]).T


def state_space(hf: Weights, inner: int, keys: int, heads: int) -> Weights:
    """Mamba-2: rows are z, x, B, C and dt there; ours are C, B and x, and their convolution has that order."""
    z, x, b, c, dt = hf["in_proj.weight"].split([inner, inner, keys, keys, heads])
    bias = hf["conv1d.bias"].split([inner, keys, keys])
    tensors = {
        "q_proj.weight": c,
        "kv_proj.weight": torch.cat([b, x]),
        "output_stage.gate.up.weight": z,
        "kernel.rule.gate_projection.up.weight": dt,
        "short_convolution.weight": convolution(hf["conv1d.weight"], [inner, keys, keys], [2, 1, 0]),
        "short_convolution.bias": torch.cat([bias[2], bias[1], bias[0]]),
        "kernel.rule.decay.a_log": hf["A_log"],
        "kernel.rule.decay.dt_bias": hf["dt_bias"],
        "kernel.rule.skip": hf["D"],
        "out_proj.weight": hf["out_proj.weight"],
    }
    if "norm.weight" in hf:
        tensors["output_stage.norm.weight"] = hf["norm.weight"]
    return tensors


def attention(hf: Weights) -> Weights:
    return {
        "q_proj.weight": hf["q_proj.weight"],
        "kv_proj.weight": torch.cat([hf["k_proj.weight"], hf["v_proj.weight"]]),
        "out_proj.weight": hf["o_proj.weight"],
    }


def gated_feedforward(hf: Weights) -> Weights:
    return {f"{name}.weight": hf[f"{name}_proj.weight"] for name in ("gate", "up", "down")}


def plain_feedforward(hf: Weights) -> Weights:
    return {f"{name}.weight": hf[f"{name}_proj.weight"] for name in ("up", "down")}


def router(hf: Weights) -> Weights:
    return {
        "router.proj.weight": hf["gate.weight"],
        "router.selection_bias.bias": hf["gate.e_score_correction_bias"],
    }


def compare(ours: Any, theirs: nn.Module, tensors: Weights) -> None:
    """The same logits, and the same text one token at a time from our state."""
    # what counts the load of experts in training is no weight
    missing, unexpected = ours.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.endswith("selection_bias.load") for name in missing)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens).logits, expected, atol=1e-4, rtol=1e-4)
        state = ours.init_state(2)
        steps = []
        for token in tokens.split(1, 1):
            out = ours(token, state=state)
            state = out.state
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)


def test_nemotron_h_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.nemotron_h")
    config = peer.NemotronHConfig(
        **EAGER,
        hybrid_override_pattern="ME-*M",
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        ssm_state_size=5,
        mamba_num_heads=6,
        mamba_head_dim=4,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=10,
        routed_scaling_factor=1.5,
    )
    theirs = peer.NemotronHForCausalLM(config).eval()
    hf = tensors_of(theirs)
    sizes: dict[str, Any] = {"state_heads": 6, "state_head_dim": 4, "groups": 2, "state_dim": 5}
    experts: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 12, "shared_expert_dim": 10}
    ours = mf.build(
        "nemotron-h",
        vocab=VOCAB,
        dim=DIM,
        depth=5,
        heads=HEADS,
        kv_heads=2,
        head_dim=8,
        ff_dim=20,
        pattern="ME-FM",
        expert_scale=1.5,
        **sizes,
        **experts,
    )
    tensors = {
        "embed.token.weight": hf["model.embeddings.weight"],
        "body.norm.inner.weight": hf["model.norm_f.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for number, letter in enumerate("ME-FM"):
        mixer = part(hf, f"model.layers.{number}.mixer")
        branch = "ff" if letter in "E-" else "attention"
        tensors[f"body.{number}.{branch}.pre_norm.weight"] = hf[f"model.layers.{number}.norm.weight"]
        if letter == "M":
            inner = state_space(mixer, 24, 10, 6)
        elif letter == "F":
            inner = attention(mixer)
        elif letter == "-":
            inner = plain_feedforward(mixer)
        else:
            inner = router(mixer)
            inner |= {f"experts.{name}.weight": mixer[f"experts.{name}_proj"] for name in ("up", "down")}
            inner |= under("shared", plain_feedforward(part(mixer, "shared_experts")))
        tensors |= under(f"body.{number}.{branch}.inner", inner)
    compare(ours, theirs, tensors)


def test_falcon_h1_with_all_multipliers_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.falcon_h1")
    config = peer.FalconH1Config(
        **EAGER,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        mamba_d_ssm=24,
        mamba_n_heads=6,
        mamba_d_head=4,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_chunk_size=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        embedding_multiplier=2.5,
        lm_head_multiplier=0.4,
        attention_in_multiplier=1.2,
        key_multiplier=0.7,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.1,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ssm_out_multiplier=0.9,
        mlp_multipliers=[0.8, 1.3],
    )
    theirs = peer.FalconH1ForCausalLM(config).eval()
    hf = tensors_of(theirs)
    ours = mf.build(
        "falcon-h1",
        vocab=VOCAB,
        dim=DIM,
        depth=2,
        heads=HEADS,
        kv_heads=2,
        head_dim=8,
        ff_dim=20,
        state_heads=6,
        state_head_dim=4,
        groups=2,
        state_dim=5,
        rope_base=10_000.0,
        embedding_multiplier=2.5,
        logit_multiplier=0.4,
        attention_in_multiplier=1.2,
        key_multiplier=0.7,
        attention_out_multiplier=0.8,
        state_in_multiplier=1.1,
        state_multipliers=(0.9, 1.1, 0.8, 1.2, 0.7),
        state_out_multiplier=0.9,
        gate_multiplier=0.8,
        down_multiplier=1.3,
    )
    tensors = {
        "embed.token.weight": hf["model.embed_tokens.weight"],
        "body.norm.inner.weight": hf["model.final_layernorm.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for number in range(2):
        layer = part(hf, f"model.layers.{number}")
        place = f"body.{number}"
        tensors[f"{place}.mixer.pre_norm.weight"] = layer["input_layernorm.weight"]
        tensors[f"{place}.ff.pre_norm.weight"] = layer["pre_ff_layernorm.weight"]
        tensors |= under(f"{place}.mixer.inner.memory", state_space(part(layer, "mamba"), 24, 10, 6))
        tensors |= under(f"{place}.mixer.inner.attention", attention(part(layer, "self_attn")))
        tensors |= under(f"{place}.ff.inner", gated_feedforward(part(layer, "feed_forward")))
    compare(ours, theirs, tensors)


def latent_attention(hf: Weights) -> Weights:
    return {
        "q_proj.weight": hf["q_proj.weight"],
        "kv_down_proj.weight": hf["kv_a_proj_with_mqa.weight"],
        "kv_norm.weight": hf["kv_a_layernorm.weight"],
        "kv_proj.weight": hf["kv_b_proj.weight"],
        "out_proj.weight": hf["o_proj.weight"],
    }


def kimi_delta_attention(hf: Weights) -> Weights:
    gates = "kernel.rule.gate_projection"
    return {
        **attention(hf),
        "short_convolution.weight": hf["conv1d.weight"][:, 0].T,
        f"{gates}.decay.down.weight": hf["forget_gate.f_a_proj.weight"],
        f"{gates}.decay.up.weight": hf["forget_gate.f_b_proj.weight"],
        f"{gates}.strength.up.weight": hf["b_proj.weight"],
        "kernel.rule.decay.a_log": hf["forget_gate.A_log"].flatten(),
        "kernel.rule.decay.dt_bias": hf["forget_gate.dt_bias"],
        "output_stage.gate.down.weight": hf["g_a_proj.weight"],
        "output_stage.gate.up.weight": hf["g_b_proj.weight"],
        "output_stage.norm.weight": hf["o_norm.weight"],
    }


def test_kimi_linear_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.kimi_linear")
    config = peer.KimiLinearConfig(
        **EAGER,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_head_dim=6,
        linear_num_heads=3,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        moe_intermediate_size=12,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    theirs = peer.KimiLinearForCausalLM(config).eval()
    hf = tensors_of(theirs)
    sizes: dict[str, Any] = {"head_dim": 8, "shared_key_dim": 4, "value_dim": 6, "latent_dim": 10}
    ours = mf.build(
        "kimi-linear",
        vocab=VOCAB,
        dim=DIM,
        depth=3,
        heads=HEADS,
        pattern="AFA",
        delta_heads=3,
        delta_head_dim=6,
        ff_dim=20,
        expert_dim=12,
        num_experts=4,
        experts_per_token=2,
        dense_layers=1,
        **sizes,
    )
    tensors = {
        "embed.token.weight": hf["model.embed_tokens.weight"],
        "body.norm.inner.weight": hf["model.norm.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for number, letter in enumerate("AFA"):
        layer = part(hf, f"model.layers.{number}")
        place = f"body.{number}"
        tensors[f"{place}.attention.pre_norm.weight"] = layer["input_layernorm.weight"]
        tensors[f"{place}.ff.pre_norm.weight"] = layer["post_attention_layernorm.weight"]
        convert = latent_attention if letter == "F" else kimi_delta_attention
        tensors |= under(f"{place}.attention.inner", convert(part(layer, "self_attn")))
        mlp = part(layer, "mlp")
        if number == 0:
            tensors |= under(f"{place}.ff.inner", gated_feedforward(mlp))
            continue
        gate_rows, up_rows = mlp["experts.gate_up_proj"].chunk(2, 1)
        experts = {"gate.weight": gate_rows, "up.weight": up_rows, "down.weight": mlp["experts.down_proj"]}
        tensors |= under(f"{place}.ff.inner", router(mlp))
        tensors |= under(f"{place}.ff.inner.experts", experts)
        tensors |= under(f"{place}.ff.inner.shared", gated_feedforward(part(mlp, "shared_experts")))
    compare(ours, theirs, tensors)


def test_qwen3_5_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.qwen3_5")
    config = peer.Qwen3_5TextConfig(
        **EAGER,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    theirs = peer.Qwen3_5ForCausalLM(config).eval()
    hf = tensors_of(theirs)
    ours = mf.build(
        "qwen3-5",
        vocab=VOCAB,
        dim=DIM,
        depth=2,
        heads=HEADS,
        kv_heads=2,
        head_dim=8,
        rotated_dim=4,
        ff_dim=20,
        pattern="LF",
        delta_heads=4,
        delta_key_heads=2,
        delta_head_dim=6,
        delta_value_dim=5,
        rope_base=10_000.0,
    )
    tensors = {
        "embed.token.weight": hf["model.embed_tokens.weight"],
        "body.norm.inner.weight": 1 + hf["model.norm.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for number in range(2):
        layer = part(hf, f"model.layers.{number}")
        place = f"body.{number}"
        # gains are stored as differences from 1, but for that of the delta rule
        tensors[f"{place}.attention.pre_norm.weight"] = 1 + layer["input_layernorm.weight"]
        tensors[f"{place}.ff.pre_norm.weight"] = 1 + layer["post_attention_layernorm.weight"]
        tensors |= under(f"{place}.ff.inner", gated_feedforward(part(layer, "mlp")))
    delta = part(hf, "model.layers.0.linear_attn")
    q, kv = delta["in_proj_qkv.weight"].split([12, 32])
    gates = "kernel.rule.gate_projection"
    tensors |= under(
        "body.0.attention.inner",
        {
            "q_proj.weight": q,
            "kv_proj.weight": kv,
            "output_stage.gate.up.weight": delta["in_proj_z.weight"],
            f"{gates}.strength.up.weight": delta["in_proj_b.weight"],
            f"{gates}.decay.up.weight": delta["in_proj_a.weight"],
            "short_convolution.weight": delta["conv1d.weight"][:, 0].T,
            "kernel.rule.decay.a_log": delta["A_log"],
            "kernel.rule.decay.dt_bias": delta["dt_bias"],
            "output_stage.norm.weight": delta["norm.weight"],
            "out_proj.weight": delta["out_proj.weight"],
        },
    )
    full = part(hf, "model.layers.1.self_attn")
    # each head has its query and its gate side by side
    query, gate = full["q_proj.weight"].view(HEADS, 2, 8, DIM).unbind(1)
    full["q_proj.weight"] = query.flatten(0, 1)
    tensors |= under(
        "body.1.attention.inner",
        {
            **attention(full),
            "output_stage.gate.up.weight": gate.flatten(0, 1),
            "position.parts.0.query_norm.weight": 1 + full["q_norm.weight"],
            "position.parts.0.key_norm.weight": 1 + full["k_norm.weight"],
        },
    )
    compare(ours, theirs, tensors)


@pytest.mark.parametrize("rope_base", [None, 10_000.0])
def test_olmo_hybrid_is_that_of_transformers(rope_base: float | None) -> None:
    peer = pytest.importorskip("transformers.models.olmo_hybrid")
    config = peer.OlmoHybridConfig(
        **EAGER,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": rope_base or 1.0},
        eos_token_id=None,
    )
    if rope_base is None:
        # its own default is a base of 10,000
        config.rope_parameters = None
    theirs = peer.OlmoHybridForCausalLM(config).eval()
    hf = tensors_of(theirs)
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "depth": 2, "heads": HEADS, "kv_heads": 2, "ff_dim": 20}
    ours = mf.build("olmo-hybrid", **sizes, pattern="LF", rope_base=rope_base)
    delta, full = (part(hf, f"model.layers.{number}") for number in range(2))
    linear = part(delta, "linear_attn")
    gates = "kernel.rule.gate_projection"
    position = "position" if rope_base is None else "position.parts.0"
    tensors = {
        "embed.token.weight": hf["model.embed_tokens.weight"],
        "body.norm.inner.weight": hf["model.norm.weight"],
        "head.weight": hf["lm_head.weight"],
        "body.0.attention.pre_norm.weight": delta["input_layernorm.weight"],
        "body.0.ff.pre_norm.weight": delta["post_attention_layernorm.weight"],
        # behind the branches
        "body.1.attention.inner_norm.weight": full["post_attention_layernorm.weight"],
        "body.1.ff.inner_norm.weight": full["post_feedforward_layernorm.weight"],
        **under("body.0.ff.inner", gated_feedforward(part(delta, "mlp"))),
        **under("body.1.ff.inner", gated_feedforward(part(full, "mlp"))),
        **under("body.1.attention.inner", attention(part(full, "self_attn"))),
        f"body.1.attention.inner.{position}.query_norm.weight": full["self_attn.q_norm.weight"],
        f"body.1.attention.inner.{position}.key_norm.weight": full["self_attn.k_norm.weight"],
        **under("body.0.attention.inner", attention(linear)),
    }
    tensors |= under(
        "body.0.attention.inner",
        {
            "output_stage.gate.up.weight": linear["g_proj.weight"],
            f"{gates}.strength.up.weight": linear["b_proj.weight"],
            f"{gates}.decay.up.weight": linear["a_proj.weight"],
            "short_convolution.weight": linear["conv1d.weight"][:, 0].T,
            "kernel.rule.decay.a_log": linear["A_log"],
            "kernel.rule.decay.dt_bias": linear["dt_bias"],
            "output_stage.norm.weight": linear["o_norm.weight"],
        },
    )
    compare(ours, theirs, tensors)


def test_the_gated_convolution_is_that_of_lfm2() -> None:
    peer = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = peer.Lfm2Config(**EAGER, conv_L_cache=3, conv_bias=False, num_hidden_layers=1, num_attention_heads=HEADS)
    theirs = peer.Lfm2ShortConv(config, 0)
    hf = tensors_of(theirs)
    ours = GatedConvolution(DIM, 3)
    ours.load_state_dict(
        {
            "in_proj.weight": hf["in_proj.weight"],
            "weight": hf["conv.weight"][:, 0].T,
            "out_proj.weight": hf["out_proj.weight"],
        }
    )
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1))
    ctx = Context(contiguous_positions(2, 0, LENGTH, x.device))
    with torch.no_grad():
        y = theirs(x)
        y = y[0] if isinstance(y, tuple) else y
        torch.testing.assert_close(ours(x, ctx).y, y, atol=1e-5, rtol=1e-5)


def mamba(hf: Weights) -> Weights:
    tensors = {f"{name}.weight": hf[f"{name}.weight"] for name in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    norms = {f"norms.{place}.weight": hf[f"{name}_layernorm.weight"] for place, name in enumerate(("dt", "b", "c"))}
    return {
        **tensors,
        **norms,
        "dt_proj.bias": hf["dt_proj.bias"],
        "short_convolution.weight": hf["conv1d.weight"][:, 0].T,
        "short_convolution.bias": hf["conv1d.bias"],
        "a_log": hf["A_log"].flatten(),
        "skip": hf["D"],
    }


def test_jamba_is_that_of_transformers() -> None:
    peer = pytest.importorskip("transformers.models.jamba")
    config = peer.JambaConfig(
        **EAGER,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=5,
        mamba_dt_rank=3,
        num_experts=4,
    )
    theirs = peer.JambaForCausalLM(config).eval()
    hf = tensors_of(theirs)
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "depth": 3, "heads": HEADS, "kv_heads": 2, "ff_dim": 20}
    ours = mf.build("jamba", **sizes, pattern="mFm", state_dim=5, step_rank=3, num_experts=4)
    tensors = {
        "embed.token.weight": hf["model.embed_tokens.weight"],
        "body.norm.inner.weight": hf["model.final_layernorm.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for number, letter in enumerate("mFm"):
        layer = part(hf, f"model.layers.{number}")
        place = f"body.{number}"
        branch = "mixer" if letter == "m" else "attention"
        tensors[f"{place}.{branch}.pre_norm.weight"] = layer["input_layernorm.weight"]
        tensors[f"{place}.ff.pre_norm.weight"] = layer["pre_ff_layernorm.weight"]
        inner = mamba(part(layer, "mamba")) if letter == "m" else attention(part(layer, "self_attn"))
        tensors |= under(f"{place}.{branch}.inner", inner)
        mlp = part(layer, "feed_forward")
        if number != 1:
            tensors |= under(f"{place}.ff.inner", gated_feedforward(mlp))
            continue
        gate_rows, up_rows = mlp["experts.gate_up_proj"].chunk(2, 1)
        experts = {"gate.weight": gate_rows, "up.weight": up_rows, "down.weight": mlp["experts.down_proj"]}
        tensors |= under(f"{place}.ff.inner.experts", experts)
        tensors[f"{place}.ff.inner.router.proj.weight"] = mlp["router.weight"]
    compare(ours, theirs, tensors)
