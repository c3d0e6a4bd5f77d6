"""Llama (Touvron et al. 2023), Mistral, Ministral, Qwen2, Qwen3, SmolLM3, Gemma 2 and 3, and the recipe `llama`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import (
    attention_rules,
    gated_rules,
    is_tied,
    rotary_config,
    rotary_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, same, shifted

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMAS = ("gemma2", "gemma3_text")


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    model_type = config.content["model_type"]
    heads, depth = config.size("num_attention_heads"), config.size("num_hidden_layers")
    config.require("mlp_bias", expected=False, default=False)
    common = {
        "vocab": config.size("vocab_size"),
        "dim": config.size("hidden_size"),
        "depth": depth,
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", 256) if model_type in GEMMAS else config.optional_size("head_dim"),
        "ff_dim": config.size("intermediate_size"),
        "ff_activation": ACTIVATIONS[_activation(config)],
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tied": is_tied(config, tensors),
        "qk_norm": model_type in ("qwen3", "gemma3_text"),
        "biases": "qkv" if model_type == "qwen2" else "all" if config.flag("attention_bias", default=False) else "none",
    }
    gemma = _gemma_keywords(config) if model_type in GEMMAS else {}
    rotary = _rotary_by_layer(config) if model_type == "gemma3_text" else rotary_keywords(config)
    return common | rotary | _window_keywords(config, depth) | _rotated_layers(config, depth) | gemma


def _activation(config: ForeignConfig) -> str:
    field = "hidden_activation" if "hidden_activation" in config.content else "hidden_act"
    return config.choice(field, "silu", ACTIVATIONS)


def _gemma_keywords(config: ForeignConfig) -> Keywords:
    return {
        "norm_order": "sandwich",
        "scaled_embedding": True,
        "score_scale": config.positive_number("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": config.optional_number("attn_logit_softcapping"),
        "logit_cap": config.optional_number("final_logit_softcapping"),
    }


def _rotary_by_layer(config: ForeignConfig) -> Keywords:
    """Rotary settings of Gemma 3, whose layers of windows have a base of their own; older files name it beside."""
    config.require("use_bidirectional_attention", expected=False, default=False)
    rope = config.part("rope_parameters")
    if FULL not in rope.content:
        window_base = config.number("rope_local_base_freq", 10_000.0)
        return rotary_keywords(config, default_base=1e6) | {"window_rope_base": window_base}
    local = rope.part(SLIDING)
    local.require("rope_type", expected="default", default="default")
    full = ForeignConfig(config.file, {**config.content, "rope_parameters": rope.part(FULL).content})
    window_base = local.number("rope_theta", 10_000.0)
    return rotary_keywords(full, default_base=1e6) | {"window_rope_base": window_base}


def _window_keywords(config: ForeignConfig, depth: int) -> Keywords:
    """The window, and which layers have it."""
    window, model_type = config.optional_size("sliding_window"), config.content["model_type"]
    uses_windows = config.flag("use_sliding_window", default=model_type in ("mistral", "ministral", *GEMMAS))
    if window is None or not uses_windows:
        return {"window_rope_base": None}
    default = [SLIDING, FULL] if model_type == "gemma2" else [SLIDING]
    if model_type == "gemma3_text":
        default = [SLIDING] * (config.size("sliding_window_pattern", 6) - 1) + [FULL]
    kinds = config.entries("layer_types", str) or (default * depth)[:depth]
    if len(kinds) != depth or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(f"{config.file}: layer_types must name {FULL} or {SLIDING} for each of {depth} layers")
    if SLIDING not in kinds:
        return {"window_rope_base": None}
    first_full = kinds.index(FULL) + 1 if FULL in kinds else None
    expected = [FULL if first_full and number % first_full == 0 else SLIDING for number in range(1, depth + 1)]
    if kinds != expected:
        raise UserError(
            f"{config.file}: layer_types has layers of windows in an order that no recipe has: the recipe llama takes "
            "windows in all layers, or full attention in every n-th"
        )
    return {"window": window, "full_every": first_full}


def _rotated_layers(config: ForeignConfig, depth: int) -> Keywords:
    """Which layers have no rotary positions; SmolLM3 lists a 1 for each layer that has them."""
    rotated = config.entries("no_rope_layers", int)
    if not rotated or 0 not in rotated:
        return {}
    interval = rotated.index(0) + 1
    if rotated != [int(number % interval != 0) for number in range(1, depth + 1)]:
        raise UserError(f"{config.file}: no_rope_layers must leave out every n-th of {depth} layers, as SmolLM3 does")
    return {"unrotated_every": interval}


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    is_gemma = keywords["norm_order"] == "sandwich"
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    kv_rows = [width * (keywords["kv_heads"] or keywords["heads"])] * 2
    norms = {"input_layernorm": "attention.pre_norm", "post_attention_layernorm": "ff.pre_norm"}
    if is_gemma:
        norms = {
            "input_layernorm": "attention.pre_norm",
            "post_attention_layernorm": "attention.inner_norm",
            "pre_feedforward_layernorm": "ff.pre_norm",
            "post_feedforward_layernorm": "ff.inner_norm",
        }
    yield same("model.embed_tokens.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        attention = f"{ours}.attention.inner"
        yield from attention_rules(f"{theirs}.self_attn", attention, kv_rows, keywords["biases"])
        if keywords["qk_norm"]:
            for part in ("query", "key"):
                name = f"{theirs}.self_attn.{part[0]}_norm.weight"
                yield _norm(name, f"{attention}.position.parts.0.{part}_norm.weight", is_gemma=is_gemma)
        yield from gated_rules(f"{theirs}.mlp", f"{ours}.ff.inner")
        for part, our_part in norms.items():
            yield _norm(f"{theirs}.{part}.weight", f"{ours}.{our_part}.weight", is_gemma=is_gemma)
    yield _norm("model.norm.weight", "body.norm.inner.weight", is_gemma=is_gemma)
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


def _norm(theirs: str, ours: str, *, is_gemma: bool) -> TensorRule:
    """The gain of a norm, of which Gemma stores the difference from 1."""
    return shifted(theirs, ours, 1.0) if is_gemma else same(theirs, ours)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    model_type, architecture = _class_of(keywords)
    dim, heads = keywords["dim"], keywords["heads"]
    width = keywords["head_dim"] or dim // heads
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": keywords["vocab"],
        "hidden_size": dim,
        "num_hidden_layers": keywords["depth"],
        "num_attention_heads": heads,
        "num_key_value_heads": keywords["kv_heads"] or heads,
        "head_dim": width,
        "intermediate_size": keywords["ff_dim"],
        "hidden_act": {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[keywords["ff_activation"]],
        "rms_norm_eps": keywords["norm_eps"],
        "tie_word_embeddings": keywords["tied"],
        "attention_bias": keywords["biases"] == "all",
        "rope_parameters": rotary_config(keywords),
    }
    return config | _layer_config(keywords) | (_gemma_config(keywords) if model_type in GEMMAS else {})


def _class_of(keywords: Mapping[str, Any]) -> tuple[str, str]:
    """The type and the class of the models that have these keywords. Raises UserError if there are none."""
    kinds = {
        "gemma3_text": ("Gemma3ForCausalLM", keywords["norm_order"] == "sandwich" and keywords["qk_norm"]),
        "gemma2": ("Gemma2ForCausalLM", keywords["norm_order"] == "sandwich"),
        "qwen3": ("Qwen3ForCausalLM", keywords["qk_norm"]),
        "qwen2": ("Qwen2ForCausalLM", keywords["biases"] == "qkv"),
        "smollm3": ("SmolLM3ForCausalLM", keywords["unrotated_every"] is not None),
        "ministral": ("MinistralForCausalLM", keywords["full_every"] is not None),
        "mistral": ("MistralForCausalLM", keywords["window"] is not None),
    }
    chosen = [(model_type, architecture) for model_type, (architecture, is_needed) in kinds.items() if is_needed]
    model_type, architecture = chosen[0] if chosen else ("llama", "LlamaForCausalLM")
    gemma = {"window", "full_every", "score_scale", "score_cap", "logit_cap", "scaled_embedding", "norm_order"}
    allowed = {
        "gemma3_text": {*gemma, "qk_norm", "window_rope_base"},
        "gemma2": gemma,
        "qwen3": {"window", "full_every", "qk_norm"},
        "qwen2": {"window", "full_every", "biases"},
        "smollm3": {"window", "full_every", "unrotated_every"},
        "ministral": {"window", "full_every"},
        "mistral": {"window"},
        "llama": set[str](),
    }[model_type]
    for name, default in PLAIN.items():
        if keywords[name] != default and name not in allowed and not (name == "biases" and keywords[name] == "all"):
            raise UserError(f"{name} is {keywords[name]}, which a {architecture} of these keywords does not have")
    if keywords["rope_scaling"] == "longrope":
        raise UserError(f"rope_scaling is longrope, which a {architecture} of these keywords does not have")
    if keywords["rope_scaling"] == "ntk":
        raise UserError("rope_scaling is ntk: build the model with a larger rope_base, which is the same")
    return model_type, architecture


PLAIN = {
    "kernel": "softmax",
    "sinks": None,
    "memory_length": None,
    "loops": 1,
    "norm_order": "pre",
    "qk_norm": False,
    "output_gate": False,
    "window_rope_base": None,
    "biases": "none",
    "unrotated_every": None,
    "window": None,
    "full_every": None,
    "score_scale": None,
    "score_cap": None,
    "logit_cap": None,
    "scaled_embedding": False,
    "rotated_dim": None,
}
"""The keywords that tell the classes apart, with those of Llama."""


def _layer_config(keywords: Mapping[str, Any]) -> Keywords:
    """The settings that differ from layer to layer."""
    window, interval, unrotated = keywords["window"], keywords["full_every"], keywords["unrotated_every"]
    numbers = range(1, keywords["depth"] + 1)
    kinds = [FULL if window is None or (interval and number % interval == 0) else SLIDING for number in numbers]
    config: Keywords = {"sliding_window": window, "use_sliding_window": window is not None}
    # a Mistral, whose layers all have windows, would be read as a Ministral with it
    if FULL in kinds or keywords["norm_order"] == "sandwich":
        config["layer_types"] = kinds
    if unrotated is not None:
        config["no_rope_layers"] = [int(number % unrotated != 0) for number in numbers]
    return config | ({"max_window_layers": 0} if window is not None else {})


def _gemma_config(keywords: Mapping[str, Any]) -> Keywords:
    if not keywords["scaled_embedding"]:
        raise UserError("norm_order is sandwich without scaled_embedding, and Gemma 2 scales its embedding")
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    scale = keywords["score_scale"]
    scalar = width if scale is None else scale**-2
    if abs(scalar - round(scalar)) > 1e-6:
        raise UserError(f"score_scale is {scale}, and that of Gemma 2 is 1 / sqrt(n) for a whole number n")
    activation = {"gelu-tanh": "gelu_pytorch_tanh", "gelu": "gelu", "silu": "silu"}[keywords["ff_activation"]]
    return {
        "hidden_activation": activation,
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": keywords["score_cap"],
        "final_logit_softcapping": keywords["logit_cap"],
        **(_rotary_config_by_layer(keywords) if keywords["qk_norm"] else {}),
    }


def _rotary_config_by_layer(keywords: Mapping[str, Any]) -> Keywords:
    full = rotary_config(keywords)
    base = keywords["window_rope_base"]
    local = full if base is None else {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


LLAMA = ModelFamily(
    title="Llama",
    model_types=("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", *GEMMAS),
    recipe="llama",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "frequencies of rotary positions, which follow from "
        "the base"
    },
)
"""Rotated pairs are the halves of a head in all of them, as in the recipe."""
