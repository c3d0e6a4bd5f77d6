"""Parts of decoders in the manner of Llama that several families share."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords
from manyformer.interop.tensor_rules import PARAMETERS, WEIGHT, TensorRule, same, stacked, stacked_experts

ROPE_TYPES = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
FIXED_ROPE_FIELDS: dict[str, Any] = {
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The settings of rotary scaling that the recipe has with these values alone."""
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def size_keywords(config: ForeignConfig, tensors: Collection[str], *, norm_eps: float) -> Keywords:
    """The sizes that all of them have; `norm_eps` stands for a missing `rms_norm_eps`."""
    heads = config.size("num_attention_heads")
    return {
        "vocab": config.size("vocab_size"),
        "dim": config.size("hidden_size"),
        "depth": config.size("num_hidden_layers"),
        "heads": heads,
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "tied": is_tied(config, tensors),
    }


def size_config(keywords: Mapping[str, Any], model_type: str, architecture: str) -> Keywords:
    """The fields of a config with the sizes that all of them have."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": keywords["vocab"],
        "hidden_size": keywords["dim"],
        "num_hidden_layers": keywords["depth"],
        "num_attention_heads": keywords["heads"],
        "rms_norm_eps": keywords["norm_eps"],
        "tie_word_embeddings": keywords["tied"],
        "hidden_act": "silu",
    }


def frame_rules(keywords: Mapping[str, Any], norm: Callable[[str, str], TensorRule] = same) -> Iterator[TensorRule]:
    """The embedding, the norms before the branches of each layer, the last norm and the output."""
    yield same("model.embed_tokens.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        yield norm(f"{theirs}.input_layernorm.weight", f"{ours}.attention.pre_norm.weight")
        yield norm(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ff.pre_norm.weight")
    yield norm("model.norm.weight", "body.norm.inner.weight")
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


def rotary_keywords(
    config: ForeignConfig, *, default_base: float = 10_000.0, fixed: Mapping[str, Any] | None = None
) -> Keywords:
    """Rotary settings, which versions before 5 had in `rope_theta` and `rope_scaling`.

    `fixed` are those that a recipe has with other values than `FIXED_ROPE_FIELDS`."""
    rope = config.part("rope_parameters") if "rope_parameters" in config.content else config.part("rope_scaling")
    base = rope if "rope_theta" in rope.content else config
    kind = rope.choice("rope_type" if "rope_type" in rope.content else "type", "default", ROPE_TYPES)
    keywords = {"rope_base": base.number("rope_theta", default_base), "rope_scaling": ROPE_TYPES[kind]}
    if kind == "default":
        return keywords
    for name, default in FIXED_ROPE_FIELDS.items():
        rope.require(name, expected=(fixed or {}).get(name, default), default=default)
    length = rope if "original_max_position_embeddings" in rope.content else config
    field = "original_max_position_embeddings" if length is rope else "max_position_embeddings"
    return keywords | {"rope_factor": rope.number("factor", 1.0), "original_length": length.size(field, 2048)}


def yarn_keywords(config: ForeignConfig, rotary: Keywords) -> Keywords:
    """Rotary settings for recipes with YaRN or no scaling. Raises UserError for another one."""
    if rotary["rope_scaling"] not in ("none", "yarn"):
        raise UserError(f"{config.file}: rope_type is {rotary['rope_scaling']}, and the recipe has yarn alone")
    keywords = {name: value for name, value in rotary.items() if name != "rope_scaling"}
    return {"rope_factor": 1.0, **keywords}


def rotary_config(keywords: Mapping[str, Any], *, fixed: Mapping[str, Any] | None = None) -> Keywords:
    """The entry `rope_parameters` of a config."""
    rope: Keywords = {"rope_type": "default", "rope_theta": keywords["rope_base"]}
    if keywords["rope_scaling"] != "none":
        rope |= {
            "rope_type": {ours: theirs for theirs, ours in ROPE_TYPES.items()}[keywords["rope_scaling"]],
            "factor": keywords["rope_factor"],
            "original_max_position_embeddings": keywords["original_length"],
            **(fixed or {}),
        }
    if keywords["rope_scaling"] == "llama3":
        rope |= {name: FIXED_ROPE_FIELDS[name] for name in ("low_freq_factor", "high_freq_factor")}
    return rope


def plain_rotary_base(config: ForeignConfig, *, default_base: float = 10_000.0) -> float:
    """The base of rotary positions that are not scaled. Raises UserError for others."""
    rotary = rotary_keywords(config, default_base=default_base)
    if rotary["rope_scaling"] != "none":
        raise UserError(f"{config.file}: rope_type is {rotary['rope_scaling']}, and no recipe of this family has that")
    return float(rotary["rope_base"])


def is_tied(config: ForeignConfig, tensors: Collection[str]) -> bool:
    """Whether the output is the embedding, which the file decides. Raises UserError for a model without its head."""
    if "lm_head.weight" in tensors:
        return False
    # the default differs from family to family, and configs with the default lack the field
    if config.is_bare and config.content.get("tie_word_embeddings") is False:
        raise UserError(
            f"{config.file}: architectures is {config.architecture}, which lacks the head of a language model, "
            "lm_head.weight"
        )
    return True


def attention_rules(theirs: str, ours: str, kv_rows: Sequence[int], biases: str) -> Iterator[TensorRule]:
    """The projections of attention, of which none, the inputs ("qkv") or all have a bias."""
    biased = {"none": (), "qkv": ("q_proj",), "all": ("q_proj", "o_proj")}[biases]
    for part, our_part in {"q_proj": "q_proj", "o_proj": "out_proj"}.items():
        for kind in PARAMETERS if part in biased else WEIGHT:
            yield same(f"{theirs}.{part}.{kind}", f"{ours}.{our_part}.{kind}")
    for kind in PARAMETERS if biased else WEIGHT:
        pair = [f"{theirs}.{part}.{kind}" for part in ("k_proj", "v_proj")]
        yield stacked(pair, f"{ours}.kv_proj.{kind}", kv_rows)


def gated_rules(theirs: str, ours: str) -> Iterator[TensorRule]:
    """The matrices of a gated feed-forward layer."""
    for part in ("gate", "up", "down"):
        yield same(f"{theirs}.{part}_proj.weight", f"{ours}.{part}.weight")


def expert_rules(
    theirs: str, ours: str, num_experts: int, parts: Mapping[str, str] = EXPERT_PARTS
) -> Iterator[TensorRule]:
    """The matrices of gated experts, which stand in the file one by one."""
    for part, our_part in parts.items():
        yield stacked_experts(
            [f"{theirs}.{expert}.{part}.weight" for expert in range(num_experts)], f"{ours}.{our_part}.weight"
        )


def layer_pattern(config: ForeignConfig, letters: Mapping[str, str], *, default: Sequence[str]) -> str:
    """The kinds of layers in `layer_types` as letters, without repetition; `default` stands for a missing field.

    Raises UserError unless there is a known kind for each layer."""
    depth = config.size("num_hidden_layers")
    kinds = config.entries("layer_types", str) or [default[number % len(default)] for number in range(depth)]
    if len(kinds) != depth or not all(kind in letters for kind in kinds):
        raise UserError(f"{config.file}: layer_types must name {' or '.join(letters)} for each of {depth} layers")
    pattern = "".join(letters[kind] for kind in kinds)
    periods = (pattern[:length] for length in range(1, depth + 1))
    return next(period for period in periods if (period * depth)[:depth] == pattern)
