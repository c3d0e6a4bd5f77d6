"""T5 (Raffel et al. 2020), T5 1.1, Flan-T5, mT5, and the recipe `t5`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.interop import model_family as rules
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import WEIGHT, ModelFamily, TensorRule, attention_projections, same, scaled

ACTIVATIONS = {"relu": "relu", "gated-gelu": "gated-gelu", "gated-gelu_new": "gated-gelu"}

BRANCHES = {"attention": "SelfAttention", "cross": "EncDecAttention", "ff": "DenseReluDense"}
"""From the branches of a layer, in their order, to the modules of theirs."""


def _output(config: ForeignConfig) -> str:
    """Whether the output is the embedding, and scaled as in the first T5."""
    is_scaled = config.flag("scale_decoder_outputs", default=config.flag("tie_word_embeddings", default=True))
    if is_scaled and config.model_type != "mt5":
        return "tied"
    if "lm_head.weight" in config.tensors:
        return "untied"
    return "tied-unscaled"


def _decoder_depth(keywords: Mapping[str, Any]) -> int:
    return int(keywords["decoder_depth"] or keywords["depth"])


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    output = keywords["output"]
    factor = 1.0
    if output != "tied-unscaled":
        factor = keywords["dim"] ** -0.5
    yield scaled("shared.weight", "embed_target.token.weight", factor)
    if output == "untied":
        yield same("lm_head.weight", "head.weight")
    feed_forward = {"wi": "up", "wo": "down"}
    if keywords["activation"] == "gated-gelu":
        feed_forward = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    kv_rows = [keywords["heads"] * keywords["head_dim"]] * 2
    for side in ("encoder", "decoder"):
        yield same(f"{side}.final_layer_norm.weight", f"{side}.norm.inner.weight")
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield same(table, f"{side}.0.attention.inner.position.weight")
        branches = [branch for branch in BRANCHES if side == "decoder" or branch != "cross"]
        if side == "decoder":
            depth = _decoder_depth(keywords)
        else:
            depth = keywords["depth"]
        for layer in range(depth):
            for place, branch in enumerate(branches):
                theirs = f"{side}.block.{layer}.layer.{place}"
                ours = f"{side}.{layer}.{branch}"
                yield same(f"{theirs}.layer_norm.weight", f"{ours}.pre_norm.weight")
                inner = f"{theirs}.{BRANCHES[branch]}"
                if branch == "ff":
                    for name, part in feed_forward.items():
                        yield same(f"{inner}.{name}.weight", f"{ours}.inner.{part}.weight")
                    continue
                projections = [f"{inner}.{part}" for part in "qkvo"]
                yield from attention_projections(projections, f"{ours}.inner", kv_rows, WEIGHT)


T5 = ModelFamily(
    title="T5",
    model_types=("t5", "mt5"),
    recipe="t5",
    prefix="",
    config_rules=(
        rules.written(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        rules.size("vocab_size", "vocab", 32128),
        rules.size("d_model", "dim", 512),
        rules.size("num_layers", "depth", 6),
        rules.setting(
            "num_decoder_layers",
            "decoder_depth",
            lambda config: config.size("num_decoder_layers", config.size("num_layers", 6)),
            _decoder_depth,
        ),
        rules.size("num_heads", "heads", 8),
        rules.size("d_kv", "head_dim", 64),
        rules.size("d_ff", "ff_dim", 2048),
        rules.choice("feed_forward_proj", "activation", "relu", ACTIVATIONS),
        rules.setting("tie_word_embeddings", "output", _output, lambda keywords: keywords["output"] == "tied"),
        rules.size("relative_attention_num_buckets", "buckets", 32),
        rules.size("relative_attention_max_distance", "max_distance", 128),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-6),
        rules.number("dropout_rate", "dropout", 0.1),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "positions of attention to "
        "the source, which older versions stored and no version uses",
    },
)
"""Their tied outputs are multiplied by 1 / sqrt(dim); our embedding is stored so, and scaled back where it enters."""

FAMILIES = (T5,)
