"""Decoders in the manner of Llama: what their families share, so that one is a table of fields and a layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    PARAMETERS,
    WEIGHT,
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    same,
    stacked,
    stacked_experts,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

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

NORMS = {"input_layernorm": "attention.pre_norm", "post_attention_layernorm": "ff.pre_norm"}
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

NormRule = Callable[[str, str], TensorRule]
LayerRules = Callable[[str, str, int, Mapping[str, Any]], Iterator[TensorRule]]


def is_tied(config: HFConfig) -> bool:
    """Whether the output is the embedding, which the file decides. Raises UserError for a model without its head."""
    if "lm_head.weight" in config.tensors:
        return False
    # the default differs from family to family, and configs with the default lack the field
    if config.is_bare and config.content.get("tie_word_embeddings") is False:
        raise UserError(
            f"{config.file}: architectures is {config.architecture}, which lacks the head of a language model, "
            "lm_head.weight"
        )
    return True


SIZES = (
    rules.size("vocab_size", "vocab"),
    rules.size("hidden_size", "dim"),
    rules.size("num_hidden_layers", "depth"),
    rules.size("num_attention_heads", "heads"),
    rules.setting("tie_word_embeddings", "tied", is_tied),
)
"""The settings that all of them have."""


def kv_heads(default: int | str | None = "num_attention_heads") -> ConfigRule:
    """The number of heads of keys and values; `default` stands for a missing field."""
    return rules.setting(
        "num_key_value_heads",
        "kv_heads",
        lambda config: config.size("num_key_value_heads", default),
        lambda keywords: keywords["kv_heads"] or keywords["heads"],
    )


def head_dim(
    read: Callable[[HFConfig], int | None] = lambda config: config.optional_size("head_dim"),
) -> ConfigRule:
    """The width of a head, which exports always name."""
    return rules.setting("head_dim", "head_dim", read, head_width)


def head_width(keywords: Mapping[str, Any]) -> int:
    """The width of a head, whether it is given or follows from the others."""
    return int(keywords["head_dim"] or keywords["dim"] // keywords["heads"])


def layer_pattern(letters: Mapping[str, str], default: Callable[[HFConfig], Sequence[str]]) -> ConfigRule:
    """The kinds of layers in `layer_types` as letters, without repetition; `default` stands for a missing field.

    Reading raises UserError unless there is a known kind for each layer."""
    names = {letter: kind for kind, letter in letters.items()}

    def read(config: HFConfig) -> str:
        depth = config.size("num_hidden_layers")
        usual = default(config)
        kinds = config.entries("layer_types", str) or [usual[layer % len(usual)] for layer in range(depth)]
        if len(kinds) != depth or not all(kind in letters for kind in kinds):
            raise UserError(f"{config.file}: layer_types must name {' or '.join(letters)} for each of {depth} layers")
        pattern = "".join(letters[kind] for kind in kinds)
        # the shortest letters that repeat to this pattern: what a person would write
        periods = (pattern[:length] for length in range(1, depth + 1))
        return next(period for period in periods if (period * depth)[:depth] == pattern)

    def write(keywords: Mapping[str, Any]) -> list[str]:
        pattern = keywords["pattern"]
        return [names[pattern[layer % len(pattern)]] for layer in range(keywords["depth"])]

    return rules.setting("layer_types", "pattern", read, write)


def read_rotary(
    config: HFConfig, *, default_base: float = 10_000.0, special: Mapping[str, Any] | None = None
) -> Keywords:
    """Rotary settings, which versions before 5 had in `rope_theta` and `rope_scaling`.

    `special` are those that a recipe has with other values than `FIXED_ROPE_FIELDS`."""
    if "rope_parameters" in config.content:
        rope = config.part("rope_parameters")
    else:
        rope = config.part("rope_scaling")
    # the base moved into the entry of the scaling in version 5
    base = rope if "rope_theta" in rope.content else config
    kind = rope.choice("rope_type" if "rope_type" in rope.content else "type", "default", ROPE_TYPES)
    keywords = {"rope_base": base.number("rope_theta", default_base), "rope_scaling": ROPE_TYPES[kind]}
    if kind == "default":
        return keywords
    # settings that no published model of these families changes; another value would go unnoticed otherwise
    for name, default in FIXED_ROPE_FIELDS.items():
        rope.require(name, expected=(special or {}).get(name, default), default=default)
    # without it the length of the model is that before scaling
    if "original_max_position_embeddings" in rope.content:
        length = rope
    else:
        length = config
    field = "max_position_embeddings"
    if length is rope:
        field = "original_max_position_embeddings"
    return keywords | {"rope_factor": rope.number("factor", 1.0), "original_length": length.size(field, 2048)}


def write_rotary(keywords: Mapping[str, Any], *, special: Mapping[str, Any] | None = None) -> Keywords:
    """The entry `rope_parameters` of a config."""
    rope: Keywords = {"rope_type": "default", "rope_theta": keywords["rope_base"]}
    if keywords["rope_scaling"] != "none":
        rope |= {
            "rope_type": {ours: hf for hf, ours in ROPE_TYPES.items()}[keywords["rope_scaling"]],
            "factor": keywords["rope_factor"],
            "original_max_position_embeddings": keywords["original_length"],
            **(special or {}),
        }
    if keywords["rope_scaling"] == "llama3":
        # transformers requires both of a llama3 scaling
        rope |= {name: FIXED_ROPE_FIELDS[name] for name in ("low_freq_factor", "high_freq_factor")}
    return rope


def plain_rotary_base(config: HFConfig, default_base: float = 10_000.0) -> float:
    """The base of rotary positions that are not scaled. Raises UserError for others."""
    rotary = read_rotary(config, default_base=default_base)
    if rotary["rope_scaling"] != "none":
        raise UserError(f"{config.file}: rope_type is {rotary['rope_scaling']}, and no recipe of this family has that")
    return float(rotary["rope_base"])


def plain_rotary(default_base: float = 10_000.0) -> ConfigRule:
    """Rotary positions that are not scaled."""
    return rules.setting(
        "rope_parameters",
        "rope_base",
        lambda config: plain_rotary_base(config, default_base),
        lambda keywords: {"rope_type": "default", "rope_theta": keywords["rope_base"]},
    )


def yarn_rotary(special: Mapping[str, Any], default_base: float = 10_000.0) -> ConfigRule:
    """Rotary positions with YaRN, or not scaled; `special` are the settings of YaRN that the recipe has."""

    def read(config: HFConfig) -> Keywords:
        rotary = read_rotary(config, default_base=default_base, special=special)
        scaling = rotary.pop("rope_scaling")
        if scaling not in ("none", "yarn"):
            raise UserError(f"{config.file}: rope_type is {scaling}, and the recipe has yarn alone")
        return {"rope_factor": 1.0, **rotary}

    def write(keywords: Mapping[str, Any]) -> Keywords:
        scaling = "yarn" if keywords["rope_factor"] > 1 else "none"
        return {"rope_parameters": write_rotary({"rope_scaling": scaling, **keywords}, special=special)}

    return ConfigRule(read, write)


def frame_rules(
    keywords: Mapping[str, Any], norm: NormRule = same, norms: Mapping[str, str] = NORMS
) -> Iterator[TensorRule]:
    """The embedding, the `norms` of each layer, the last norm and the output."""
    yield same("model.embed_tokens.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        for hf, ours in norms.items():
            yield norm(f"model.layers.{layer}.{hf}.weight", f"body.{layer}.{ours}.weight")
    yield norm("model.norm.weight", "body.norm.inner.weight")
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


def attention_rules(
    prefix: str, our_prefix: str, keywords: Mapping[str, Any], *, biases: str = "none"
) -> Iterator[TensorRule]:
    """The projections of attention, of which none, the inputs ("qkv") or all have a bias."""
    # keys and values have a bias where queries have one
    biased = {"none": (), "qkv": ("q_proj",), "all": ("q_proj", "o_proj")}[biases]
    kv_rows = head_width(keywords) * (keywords["kv_heads"] or keywords["heads"])
    for part, our_part in {"q_proj": "q_proj", "o_proj": "out_proj"}.items():
        for kind in PARAMETERS if part in biased else WEIGHT:
            yield same(f"{prefix}.{part}.{kind}", f"{our_prefix}.{our_part}.{kind}")
    for kind in PARAMETERS if biased else WEIGHT:
        pair = [f"{prefix}.{part}.{kind}" for part in ("k_proj", "v_proj")]
        yield stacked(pair, f"{our_prefix}.kv_proj.{kind}", [kv_rows, kv_rows])


def gated_rules(prefix: str, our_prefix: str) -> Iterator[TensorRule]:
    """The matrices of a gated feed-forward layer."""
    for part in ("gate", "up", "down"):
        yield same(f"{prefix}.{part}_proj.weight", f"{our_prefix}.{part}.weight")


def expert_rules(
    prefix: str, our_prefix: str, num_experts: int, parts: Mapping[str, str] = EXPERT_PARTS
) -> Iterator[TensorRule]:
    """The matrices of gated experts, which stand in the file one by one."""
    for part, our_part in parts.items():
        yield stacked_experts(
            [f"{prefix}.{expert}.{part}.weight" for expert in range(num_experts)], f"{our_prefix}.{our_part}.weight"
        )


def decoder_family(
    *,
    title: str,
    classes: Mapping[str, str],
    recipe: str,
    norm_eps: float,
    config_rules: Sequence[ConfigRule],
    layer: LayerRules,
    norm: NormRule = same,
    left_out: Mapping[str, str] | None = None,
    further: Callable[[Mapping[str, Any]], Iterator[TensorRule]] = lambda keywords: iter(()),
) -> ModelFamily:
    """A family whose models have Llama's names but for parts of their layers.

    `classes` are the architectures by `model_type`, of which exports name the first; `config_rules` those of the
    settings besides sizes, epsilon (`norm_eps` where it is missing) and tied outputs. `layer` makes the tensor rules of
    a layer but for its norms, from its name there, its name here, its number and the keywords; `norm` makes those of
    norms, and `further` those of tensors outside of the layers and their frame."""

    def tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
        yield from frame_rules(keywords, norm)
        for layer_number in range(keywords["depth"]):
            yield from layer(f"model.layers.{layer_number}", f"body.{layer_number}", layer_number, keywords)
        yield from further(keywords)

    model_type, architecture = next(iter(classes.items()))
    return ModelFamily(
        title=title,
        model_types=tuple(classes),
        recipe=recipe,
        prefix="model.",
        config_rules=(
            rules.written(architectures=[architecture], model_type=model_type),
            *SIZES,
            rules.number("rms_norm_eps", "norm_eps", norm_eps),
            rules.fixed(hidden_act="silu"),
            *config_rules,
        ),
        tensor_rules=tensor_rules,
        left_out=left_out or {},
    )
