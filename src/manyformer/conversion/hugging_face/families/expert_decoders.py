"""Decoders with experts, each with the recipe of its name: Mixtral, gpt-oss and DeepSeek.

Mixtral is of Jiang et al. 2024, gpt-oss of OpenAI 2025; DeepSeek is V3 (2024) and V3.2 (2025)."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    TensorRule,
    each_parameter,
    interleaved,
    same,
    transposed,
)
from manyformer.conversion.hugging_face.families.decoder_parts import (
    NORMS,
    attention_rules,
    decoder_family,
    expert_rules,
    gated_rules,
    head_dim,
    kv_heads,
    layer_pattern,
    plain_rotary,
    yarn_rotary,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

MIXTRAL_EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def _mixtral_layer(hf: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    experts = f"{hf}.block_sparse_moe"
    inner = f"{ours}.ff.inner"
    yield from attention_rules(f"{hf}.self_attn", f"{ours}.attention.inner", keywords)
    yield same(f"{experts}.gate.weight", f"{inner}.router.proj.weight")
    yield from expert_rules(f"{experts}.experts", f"{inner}.experts", keywords["num_experts"], MIXTRAL_EXPERT_PARTS)


MIXTRAL = decoder_family(
    title="Mixtral",
    classes={"mixtral": "MixtralForCausalLM"},
    recipe="mixtral",
    norm_eps=1e-5,
    config_rules=(
        kv_heads(),
        head_dim(),
        rules.size("intermediate_size", "ff_dim"),
        rules.size("num_local_experts", "num_experts", 8),
        rules.size("num_experts_per_tok", "experts_per_token", 2),
        rules.optional_size("sliding_window", "window"),
        plain_rotary(default_base=1e6),
        rules.required(router_jitter_noise=0.0),
    ),
    layer=_mixtral_layer,
)
"""Losses of balance are a matter of training and not taken over."""


GPT_OSS_LAYER_KINDS = {"sliding_attention": "W", "full_attention": "F"}


def _read_no_quantization(config: HFConfig) -> Keywords:
    # released weights are quantized (MXFP4), and packed integers are no weights to copy
    if "quantization_config" in config.content:
        raise UserError(
            f"{config.file}: quantization_config says that weights are quantized: write them as numbers first"
        )
    return {}


def _gpt_oss_layer(hf: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    experts = f"{ours}.ff.inner.experts"
    yield from attention_rules(f"{hf}.self_attn", attention, keywords, biases="all")
    yield same(f"{hf}.self_attn.sinks", f"{attention}.kernel.sinks")
    yield from each_parameter(f"{hf}.mlp.router", f"{ours}.ff.inner.router.proj")
    # one tensor of all experts for both halves of the gate
    for hf_end, end in (("", "weight"), ("_bias", "bias")):
        pair = [f"{experts}.{part}.{end}" for part in ("gate", "up")]
        yield interleaved(f"{hf}.mlp.experts.gate_up_proj{hf_end}", pair)
    yield transposed(f"{hf}.mlp.experts.down_proj", f"{experts}.down.weight")
    yield same(f"{hf}.mlp.experts.down_proj_bias", f"{experts}.down.bias")


GPT_OSS = decoder_family(
    title="gpt-oss",
    classes={"gpt_oss": "GptOssForCausalLM"},
    recipe="gpt-oss",
    norm_eps=1e-5,
    config_rules=(
        rules.fixed(attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
        ConfigRule(_read_no_quantization, lambda keywords: {}),
        kv_heads(default=8),
        head_dim(lambda config: config.size("head_dim", 64)),
        rules.size("intermediate_size", "ff_dim"),
        rules.size("num_local_experts", "num_experts"),
        rules.size("num_experts_per_tok", "experts_per_token", 4),
        rules.size("sliding_window", "window", 128),
        layer_pattern(GPT_OSS_LAYER_KINDS, lambda config: tuple(GPT_OSS_LAYER_KINDS)),
        yarn_rotary({"truncate": False}, default_base=150_000.0),
    ),
    layer=_gpt_oss_layer,
)


DEEPSEEK_CLASSES = {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
SPARSE_TYPE = "deepseek_v32"
INDEXER_SIZES = (
    rules.size("index_topk", "indexed_tokens"),
    rules.size("index_n_heads", "indexer_heads"),
    rules.size("index_head_dim", "indexer_dim"),
)
AHEAD_PARTS = {"enorm": "token_norm", "hnorm": "hidden_norm", "eh_proj": "merge", "shared_head.norm": "norm"}
INDEXER_PARTS = {"wq_b": "q_proj", "wk": "k_proj", "weights_proj": "weight_proj"}


def _read_kv_heads(config: HFConfig) -> Keywords:
    heads = config.size("num_attention_heads")
    config.require("num_key_value_heads", expected=heads, default=heads)
    return {}


def _read_indexer(config: HFConfig) -> Keywords:
    keywords: Keywords = {}
    if config.model_type == SPARSE_TYPE:
        for rule in INDEXER_SIZES:
            keywords |= rule.read(config)
    return keywords


def _write_indexer(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["indexed_tokens"] is None:
        return {}
    if keywords["rope_pairs"] != "interleaved":
        raise UserError(
            f"rope_pairs is {keywords['rope_pairs']}, and a {DEEPSEEK_CLASSES[SPARSE_TYPE]} has interleaved ones"
        )
    fields: Keywords = {"model_type": SPARSE_TYPE, "architectures": [DEEPSEEK_CLASSES[SPARSE_TYPE]]}
    for rule in INDEXER_SIZES:
        fields |= rule.write(keywords)
    return fields


def _dense_layers(config: HFConfig) -> int:
    """The number of first layers without experts. Raises UserError where layers with experts precede others."""
    count = config.whole_number("first_k_dense_replace", 3)
    kinds = None
    if config.model_type == SPARSE_TYPE:
        kinds = config.entries("mlp_layer_types", str)
    if kinds is None:
        return count
    depth = config.size("num_hidden_layers")
    # the recipe has its dense layers first
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (depth - count):
        raise UserError(f"{config.file}: mlp_layer_types must name dense and then sparse layers, {depth} of them")
    return count


def _deepseek_layer(hf: str, ours: str, layer: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    yield from _latent_attention_rules(f"{hf}.self_attn", f"{ours}.attention.inner", keywords)
    if layer < keywords["dense_layers"]:
        yield from gated_rules(f"{hf}.mlp", f"{ours}.ff.inner")
        return
    router = f"{ours}.ff.inner.router"
    yield same(f"{hf}.mlp.gate.weight", f"{router}.proj.weight")
    # the bias that balances loads while training; it selects experts and does not weigh them
    yield same(f"{hf}.mlp.gate.e_score_correction_bias", f"{router}.selection_bias.bias")
    yield from expert_rules(f"{hf}.mlp.experts", f"{ours}.ff.inner.experts", keywords["num_experts"])
    yield from gated_rules(f"{hf}.mlp.shared_experts", f"{ours}.ff.inner.shared")


def _latent_attention_rules(hf: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    query_parts = {"q_proj": "q_proj"}
    if keywords["query_latent_dim"] is not None:
        # through a latent: down, norm, up
        query_parts = {"q_a_proj": "q_down_proj", "q_a_layernorm": "q_norm", "q_b_proj": "q_proj"}
    parts = query_parts | {
        "kv_a_proj_with_mqa": "kv_down_proj",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_proj",
        "o_proj": "out_proj",
    }
    for part, our_part in parts.items():
        yield same(f"{hf}.{part}.weight", f"{ours}.{our_part}.weight")
    if keywords["indexed_tokens"] is not None:
        for part, our_part in INDEXER_PARTS.items():
            yield same(f"{hf}.indexer.{part}.weight", f"{ours}.indexer.{our_part}.weight")
        yield from each_parameter(f"{hf}.indexer.k_norm", f"{ours}.indexer.k_norm")


def _read_ahead(config: HFConfig) -> Keywords:
    # files decide: those that transformers saves again lack these layers, and their configs still count them
    depth = config.size("num_hidden_layers")
    tokens = 0
    while f"model.layers.{depth + tokens}.eh_proj.weight" in config.tensors:
        tokens += 1
    if not tokens:
        return {}
    return {"ahead": "sequential", "ahead_tokens": tokens}


def _write_ahead(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["ahead"] == "parallel":
        raise UserError("ahead is parallel, and a DeepseekV3ForCausalLM has layers ahead in a chain (sequential) alone")
    return {"num_nextn_predict_layers": _ahead_tokens(keywords)}


def _ahead_tokens(keywords: Mapping[str, Any]) -> int:
    """The number of layers of the chain that predicts further tokens."""
    if keywords["ahead"] != "sequential":
        return 0
    return int(keywords["ahead_tokens"] or 1)


def _ahead_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    """The chain of layers that predict further tokens, which follow the others in files."""
    for number in range(_ahead_tokens(keywords)):
        layer = keywords["depth"] + number
        hf = f"model.layers.{layer}"
        ours = f"auxiliary.layers.{number}"
        for part, our_part in AHEAD_PARTS.items():
            yield same(f"{hf}.{part}.weight", f"{ours}.{our_part}.weight")
        for part, our_part in NORMS.items():
            yield same(f"{hf}.{part}.weight", f"{ours}.block.{our_part}.weight")
        yield from _deepseek_layer(hf, f"{ours}.block", layer, keywords)


DEEPSEEK = decoder_family(
    title="DeepSeek-V3",
    classes=DEEPSEEK_CLASSES,
    recipe="deepseek",
    norm_eps=1e-6,
    config_rules=(
        rules.required(attention_bias=False),
        ConfigRule(_read_kv_heads, lambda keywords: {"num_key_value_heads": keywords["heads"]}),
        rules.size("qk_nope_head_dim", "head_dim"),
        rules.size("qk_rope_head_dim", "rotary_dim"),
        rules.size("v_head_dim", "value_dim"),
        rules.size("kv_lora_rank", "latent_dim"),
        rules.size("intermediate_size", "ff_dim"),
        rules.size("moe_intermediate_size", "expert_dim"),
        rules.size("n_routed_experts", "num_experts"),
        rules.size("num_experts_per_tok", "experts_per_token"),
        rules.size("n_shared_experts", "shared_experts"),
        rules.size("n_group", "expert_groups"),
        rules.size("topk_group", "groups_per_token"),
        rules.optional_size("q_lora_rank", "query_latent_dim"),
        ConfigRule(_read_indexer, _write_indexer),
        rules.setting("first_k_dense_replace", "dense_layers", _dense_layers),
        rules.number("routed_scaling_factor", "expert_scale", 2.5),
        rules.either("norm_topk_prob", "expert_weighting", "renormalized", "scores"),
        rules.either("rope_interleave", "rope_pairs", "interleaved", "halves"),
        # how the temperature of YaRN acts on all channels in released models
        yarn_rotary({"mscale": 1.0, "mscale_all_dim": 1.0}),
        ConfigRule(_read_ahead, _write_ahead),
    ),
    layer=_deepseek_layer,
    left_out={
        r"model\.layers\.\d+\.embed_tokens\.weight": "a copy of the embedding",
        r"model\.layers\.\d+\.shared_head\.head\.weight": "a copy of the output",
    },
    further=_ahead_rules,
)

FAMILIES = (MIXTRAL, GPT_OSS, DEEPSEEK)
