"""Llama (Touvron et al. 2023) and what varies it: Mistral, Ministral, Qwen2, Qwen3, SmolLM3, Gemma 2 and 3, Phi-3.

The recipe of all these is `llama`. DiffLlama, the Differential Transformer (Ye et al. 2024) of `transformers`, has the
recipe `diff-transformer`."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    divided,
    same,
    shifted,
)
from manyformer.conversion.hugging_face.families.decoder_parts import (
    NORMS,
    SIZES,
    attention_rules,
    decoder_family,
    frame_rules,
    gated_rules,
    head_dim,
    head_width,
    kv_heads,
    plain_rotary,
    read_rotary,
    write_rotary,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig
from manyformer.recipes.llama import read_divisors

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}
FULL = "full_attention"
SLIDING = "sliding_attention"

PLAIN = {
    "kernel": "softmax",
    "sinks": None,
    "memory_length": None,
    "loops": 1,
    "norm_order": "pre",
    "residual_streams": "plain",
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


class LlamaClass(NamedTuple):
    """A class of `transformers` that equals the recipe with `PLAIN` keywords, but for those named here.

    `fixed` are those that its code has otherwise, and `free` those that its config may have otherwise. A model is of
    the first class whose `fixed` it has, and whose `mark` it has otherwise than Llama. Where `has_windows`, a config
    without `use_sliding_window` uses them; `head_dim` stands for a missing width."""

    architecture: str
    fixed: Mapping[str, Any] = {}
    free: tuple[str, ...] = ()
    mark: str | None = None
    has_windows: bool = False
    head_dim: int | None = None


WINDOWS = ("window", "full_every")
CAPS = ("score_scale", "score_cap", "logit_cap", "scaled_embedding")
CLASSES = {
    "gemma3_text": LlamaClass(
        "Gemma3ForCausalLM",
        fixed={"norm_order": "sandwich", "qk_norm": True},
        free=(*WINDOWS, *CAPS, "window_rope_base"),
        has_windows=True,
        head_dim=256,
    ),
    "gemma2": LlamaClass(
        "Gemma2ForCausalLM", fixed={"norm_order": "sandwich"}, free=(*WINDOWS, *CAPS), has_windows=True, head_dim=256
    ),
    "qwen3": LlamaClass("Qwen3ForCausalLM", fixed={"qk_norm": True}, free=WINDOWS),
    "qwen2": LlamaClass("Qwen2ForCausalLM", fixed={"biases": "qkv"}, free=WINDOWS),
    "smollm3": LlamaClass("SmolLM3ForCausalLM", free=(*WINDOWS, "unrotated_every"), mark="unrotated_every"),
    "ministral": LlamaClass("MinistralForCausalLM", free=WINDOWS, mark="full_every", has_windows=True),
    "mistral": LlamaClass("MistralForCausalLM", free=("window",), mark="window", has_windows=True),
    "llama": LlamaClass("LlamaForCausalLM"),
}
"""The classes by `model_type`."""

SANDWICH_NORMS = {
    "input_layernorm": "attention.pre_norm",
    "post_attention_layernorm": "attention.inner_norm",
    "pre_feedforward_layernorm": "ff.pre_norm",
    "post_feedforward_layernorm": "ff.inner_norm",
}


def _read_class(config: HFConfig) -> Keywords:
    """The keywords that follow from the class."""
    fixed = CLASSES[config.model_type].fixed
    has_biases = "biases" not in fixed and config.flag("attention_bias", default=False)
    return {"qk_norm": False, "biases": "all" if has_biases else "none", **fixed}


def _write_class(keywords: Mapping[str, Any]) -> Keywords:
    """The type and the class of the models that have these keywords. Raises UserError if there are none."""
    model_type = _model_type(keywords)
    row = CLASSES[model_type]
    owner = f"a {row.architecture} of these keywords"
    may_differ = {*row.fixed, *row.free}
    if keywords["biases"] == "all":
        may_differ.add("biases")
    refuse_others(keywords, may_differ, owner)
    if keywords["rope_scaling"] == "longrope":
        raise UserError(f"rope_scaling is longrope, which {owner} does not have")
    if keywords["rope_scaling"] == "ntk":
        raise UserError("rope_scaling is ntk: build the model with a larger rope_base, which is the same")
    return {
        "architectures": [row.architecture],
        "model_type": model_type,
        "attention_bias": keywords["biases"] == "all",
    }


def _model_type(keywords: Mapping[str, Any]) -> str:
    """The type of the first class that a model with these keywords may be of."""
    # rows are in the order from the most special class to Llama, which any of them would fit as well
    for model_type, row in CLASSES.items():
        has_mark = row.mark is None or keywords[row.mark] != PLAIN[row.mark]
        if has_mark and all(keywords[name] == value for name, value in row.fixed.items()):
            return model_type
    return "llama"


def refuse_others(keywords: Mapping[str, Any], may_differ: Collection[str], owner: str) -> None:
    """Raise UserError for a keyword that is not Llama's, and not among those that may differ."""
    for name, default in PLAIN.items():
        if keywords[name] != default and name not in may_differ:
            raise UserError(f"{name} is {keywords[name]}, which {owner} does not have")


def _read_head_dim(config: HFConfig) -> int | None:
    default = CLASSES[config.model_type].head_dim
    if default is None:
        return config.optional_size("head_dim")
    return config.size("head_dim", default)


def _read_activation(config: HFConfig) -> Keywords:
    field = "hidden_act"
    if "hidden_activation" in config.content:
        field = "hidden_activation"
    return {"ff_activation": ACTIVATIONS[config.choice(field, "silu", ACTIVATIONS)]}


def _read_positions(config: HFConfig) -> Keywords:
    """Rotary settings; layers of windows have a base of their own in Gemma 3, whose older files name it beside."""
    if config.model_type != "gemma3_text":
        return read_rotary(config)
    config.require("use_bidirectional_attention", expected=False, default=False)
    rope = config.part("rope_parameters")
    # in older files the base of layers with windows stands beside
    if FULL not in rope.content:
        window_base = config.number("rope_local_base_freq", 10_000.0)
        return read_rotary(config, default_base=1e6) | {"window_rope_base": window_base}
    local = rope.part(SLIDING)
    local.require("rope_type", expected="default", default="default")
    # read as if full attention were all there is
    full = config._replace(content={**config.content, "rope_parameters": rope.part(FULL).content})
    window_base = local.number("rope_theta", 10_000.0)
    return read_rotary(full, default_base=1e6) | {"window_rope_base": window_base}


def _write_positions(keywords: Mapping[str, Any]) -> Keywords:
    full = write_rotary(keywords)
    if not (keywords["norm_order"] == "sandwich" and keywords["qk_norm"]):
        return {"rope_parameters": full}
    base = keywords["window_rope_base"]
    if base is None:
        local = full
    else:
        local = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def _read_windows(config: HFConfig) -> Keywords:
    """The window, and which layers have it."""
    window = config.optional_size("sliding_window")
    depth = config.size("num_hidden_layers")
    uses_windows = config.flag("use_sliding_window", default=CLASSES[config.model_type].has_windows)
    if window is None or not uses_windows:
        return {"window_rope_base": None}
    usual = _usual_layers(config)
    kinds = config.entries("layer_types", str) or (usual * depth)[:depth]
    if len(kinds) != depth or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(f"{config.file}: layer_types must name {FULL} or {SLIDING} for each of {depth} layers")
    if SLIDING not in kinds:
        return {"window_rope_base": None}
    # the recipe has full attention in every n-th layer, so its first place decides all
    first_full = kinds.index(FULL) + 1 if FULL in kinds else None
    expected = [FULL if first_full and number % first_full == 0 else SLIDING for number in range(1, depth + 1)]
    if kinds != expected:
        raise UserError(
            f"{config.file}: layer_types has layers of windows in an order that no recipe has: the recipe llama takes "
            "windows in all layers, or full attention in every n-th"
        )
    return {"window": window, "full_every": first_full}


def _usual_layers(config: HFConfig) -> list[str]:
    """The kinds of layers of one period, where the config does not list them."""
    if config.model_type == "gemma2":
        return [SLIDING, FULL]
    if config.model_type == "gemma3_text":
        return [SLIDING] * (config.size("sliding_window_pattern", 6) - 1) + [FULL]
    return [SLIDING]


def _write_windows(keywords: Mapping[str, Any]) -> Keywords:
    window = keywords["window"]
    interval = keywords["full_every"]
    fields: Keywords = {"sliding_window": window, "use_sliding_window": window is not None}
    kinds = [
        FULL if window is None or (interval and number % interval == 0) else SLIDING
        for number in range(1, keywords["depth"] + 1)
    ]
    # a Mistral, whose layers all have windows, would be read as a Ministral with it
    if FULL in kinds or keywords["norm_order"] == "sandwich":
        fields["layer_types"] = kinds
    if window is not None:
        # Qwen counts layers without windows from the bottom, and here there is none but those in layer_types
        fields["max_window_layers"] = 0
    return fields


def _read_rotated_layers(config: HFConfig) -> Keywords:
    """Which layers have no rotary positions; SmolLM3 lists a 1 for each layer that has them."""
    rotated = config.entries("no_rope_layers", int)
    depth = config.size("num_hidden_layers")
    if not rotated or 0 not in rotated:
        return {}
    interval = rotated.index(0) + 1
    if rotated != [int(number % interval != 0) for number in range(1, depth + 1)]:
        raise UserError(f"{config.file}: no_rope_layers must leave out every n-th of {depth} layers, as SmolLM3 does")
    return {"unrotated_every": interval}


def _write_rotated_layers(keywords: Mapping[str, Any]) -> Keywords:
    unrotated = keywords["unrotated_every"]
    if unrotated is None:
        return {}
    return {"no_rope_layers": [int(number % unrotated != 0) for number in range(1, keywords["depth"] + 1)]}


def _read_gemma(config: HFConfig) -> Keywords:
    if CLASSES[config.model_type].fixed.get("norm_order") != "sandwich":
        return {}
    return {
        "scaled_embedding": True,
        "score_scale": config.positive_number("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": config.optional_number("attn_logit_softcapping"),
        "logit_cap": config.optional_number("final_logit_softcapping"),
    }


def _write_gemma(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["norm_order"] != "sandwich":
        return {}
    if not keywords["scaled_embedding"]:
        raise UserError("norm_order is sandwich without scaled_embedding, and Gemma 2 scales its embedding")
    scale = keywords["score_scale"]
    # Gemma stores the number under the root, as a whole one
    scalar = head_width(keywords) if scale is None else scale**-2
    if abs(scalar - round(scalar)) > 1e-6:
        raise UserError(f"score_scale is {scale}, and that of Gemma 2 is 1 / sqrt(n) for a whole number n")
    return {
        "hidden_activation": ACTIVATION.write(keywords)["hidden_act"],
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": keywords["score_cap"],
        "final_logit_softcapping": keywords["logit_cap"],
    }


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    # Gemma stores the difference of a gain from 1
    is_gemma = keywords["norm_order"] == "sandwich"
    norm = partial(shifted, offset=1.0) if is_gemma else same
    yield from frame_rules(keywords, norm, SANDWICH_NORMS if is_gemma else NORMS)
    for layer in range(keywords["depth"]):
        hf = f"model.layers.{layer}"
        ours = f"body.{layer}"
        attention = f"{ours}.attention.inner"
        yield from attention_rules(f"{hf}.self_attn", attention, keywords, biases=keywords["biases"])
        if keywords["qk_norm"]:
            # norms of heads share their gain over all heads of a layer
            for part in ("query", "key"):
                name = f"{hf}.self_attn.{part[0]}_norm.weight"
                yield norm(name, f"{attention}.position.parts.0.{part}_norm.weight")
        yield from gated_rules(f"{hf}.mlp", f"{ours}.ff.inner")


ACTIVATION = rules.choice("hidden_act", "ff_activation", "silu", ACTIVATIONS)._replace(read=_read_activation)

LLAMA = ModelFamily(
    title="Llama",
    model_types=("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text"),
    recipe="llama",
    prefix="model.",
    config_rules=(
        ConfigRule(_read_class, _write_class),
        *SIZES,
        kv_heads(),
        head_dim(_read_head_dim),
        rules.size("intermediate_size", "ff_dim"),
        ACTIVATION,
        rules.number("rms_norm_eps", "norm_eps", 1e-6),
        rules.required(mlp_bias=False),
        ConfigRule(_read_positions, _write_positions),
        ConfigRule(_read_windows, _write_windows),
        ConfigRule(_read_rotated_layers, _write_rotated_layers),
        ConfigRule(_read_gemma, _write_gemma),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "frequencies of rotary positions, which follow from "
        "the base"
    },
)
"""Rotated pairs are the halves of a head in all of them, as in the recipe."""


LONGROPE_TYPES = ("longrope", "su", "yarn")
"""What files call LongRoPE: older ones have other names."""


def _refuse_unless_phi3(keywords: Mapping[str, Any]) -> Keywords:
    refuse_others(keywords, ("window", "rotated_dim"), "a Phi3ForCausalLM")
    width = keywords["dim"] // keywords["heads"]
    if keywords["head_dim"] not in (None, width) or keywords["ff_activation"] != "silu":
        raise UserError("a Phi3ForCausalLM has heads of dim / heads channels, and silu")
    if keywords["rope_scaling"] not in ("none", "longrope"):
        raise UserError(f"rope_scaling is {keywords['rope_scaling']}, and a Phi3ForCausalLM has longrope alone")
    return {}


def _read_phi3_rotary(config: HFConfig) -> Keywords:
    width = config.size("hidden_size") // config.size("num_attention_heads")
    rope = config.part("rope_parameters" if "rope_parameters" in config.content else "rope_scaling")
    if "partial_rotary_factor" in rope.content:
        share = rope
    else:
        share = config
    rotated = int(width * share.number("partial_rotary_factor", 1.0))
    keywords: Keywords = {"rotated_dim": None if rotated == width else rotated}
    # "type" is the name of the field in older files
    kind = rope.content.get("rope_type", rope.content.get("type", "default"))
    if kind not in LONGROPE_TYPES:
        return keywords | read_rotary(config)
    rope.require("attention_factor", expected=None, default=None)
    if "original_max_position_embeddings" in rope.content:
        length = rope
    else:
        length = config
    original = length.size("original_max_position_embeddings", 4096)
    # files of Phi-3 leave the factor out: it is what the longest text has more than the original one
    factor = rope.number("factor", config.size("max_position_embeddings", 4096) / original)
    base = rope if "rope_theta" in rope.content else config
    divisors = [_read_divisors(rope, name, rotated // 2) for name in ("short_factor", "long_factor")]
    return keywords | {
        "rope_scaling": "longrope",
        "rope_base": base.number("rope_theta", 10_000.0),
        "rope_factor": max(1.0, factor),
        "original_length": original,
        "rope_divisors": "/".join(divisors),
    }


def _read_divisors(rope: HFConfig, name: str, count: int) -> str:
    """A list of `count` numbers above 0 as a text with commas."""
    values = rope.content.get(name)
    numbers: list[Any] = values if isinstance(values, list) else []
    if len(numbers) != count or not all(type(number) in (int, float) and 0 < number < 1e30 for number in numbers):
        raise UserError(f"{rope.file}: {name} ({values!r:.60}) must be a list of {count} numbers above 0")
    return ",".join(map(repr, numbers))


def _write_phi3_rotary(keywords: Mapping[str, Any]) -> Keywords:
    width = keywords["dim"] // keywords["heads"]
    share = (keywords["rotated_dim"] or width) / width
    rope: Keywords = {"rope_type": "default", "rope_theta": keywords["rope_base"], "partial_rotary_factor": share}
    if keywords["rope_scaling"] == "none":
        return {"rope_parameters": rope}
    divisors = read_divisors(keywords["rope_divisors"])
    original = keywords["original_length"]
    rope |= {
        "rope_type": "longrope",
        "short_factor": list(divisors["original"]),
        "long_factor": list(divisors["extended"]),
        "factor": keywords["rope_factor"],
        "original_max_position_embeddings": original,
    }
    return {
        "rope_parameters": rope,
        "max_position_embeddings": round(original * keywords["rope_factor"]),
        "original_max_position_embeddings": original,
    }


def _phi3_layer(hf: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    ff = f"{ours}.ff.inner"
    width = keywords["dim"] // keywords["heads"]
    # queries, keys and values stand in one matrix, and so do gate and up
    rows = [width * keywords["heads"], 2 * width * (keywords["kv_heads"] or keywords["heads"])]
    projections = [f"{attention}.{part}.weight" for part in ("q_proj", "kv_proj")]
    yield divided(f"{hf}.self_attn.qkv_proj.weight", projections, rows)
    yield same(f"{hf}.self_attn.o_proj.weight", f"{attention}.out_proj.weight")
    inputs = [f"{ff}.{part}.weight" for part in ("gate", "up")]
    yield divided(f"{hf}.mlp.gate_up_proj.weight", inputs, [keywords["ff_dim"]] * 2)
    yield same(f"{hf}.mlp.down_proj.weight", f"{ff}.down.weight")


PHI3 = decoder_family(
    title="Phi-3",
    classes={"phi3": "Phi3ForCausalLM"},
    recipe="llama",
    norm_eps=1e-5,
    config_rules=(
        ConfigRule(lambda config: {}, _refuse_unless_phi3),
        kv_heads(),
        rules.size("intermediate_size", "ff_dim"),
        rules.optional_size("sliding_window", "window"),
        ConfigRule(_read_phi3_rotary, _write_phi3_rotary),
    ),
    layer=_phi3_layer,
)
"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024).

Their class takes the divisors by the length of each call; an import has those for texts of up to `original_length`."""


DIFFLLAMA_VECTORS = {"lambda_q1": "query_1", "lambda_k1": "key_1", "lambda_q2": "query_2", "lambda_k2": "key_2"}


def _diffllama_layer(hf: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    yield from attention_rules(f"{hf}.self_attn", attention, keywords)
    for part, our_part in DIFFLLAMA_VECTORS.items():
        yield same(f"{hf}.self_attn.{part}", f"{attention}.kernel.{our_part}")
    yield from gated_rules(f"{hf}.mlp", f"{ours}.ff.inner")


DIFFLLAMA = decoder_family(
    title="DiffLlama",
    classes={"diffllama": "DiffLlamaForCausalLM"},
    recipe="diff-transformer",
    norm_eps=1e-5,
    config_rules=(
        kv_heads(),
        head_dim(),
        rules.size("intermediate_size", "ff_dim"),
        plain_rotary(),
        rules.required(attention_bias=False),
    ),
    layer=_diffllama_layer,
)

FAMILIES = (LLAMA, PHI3, DIFFLLAMA)
