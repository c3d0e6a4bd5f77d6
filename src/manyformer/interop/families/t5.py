"""T5 (Raffel et al. 2020), T5 1.1, Flan-T5, mT5, and the recipe `t5`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, same, scaled, stacked

ACTIVATIONS = {"relu": "relu", "gated-gelu": "gated-gelu", "gated-gelu_new": "gated-gelu"}

BRANCHES = {"attention": "SelfAttention", "cross": "EncDecAttention", "ff": "DenseReluDense"}
"""From the branches of a layer, in their order, to the modules of theirs."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    depth = config.size("num_layers", 6)
    is_scaled = config.flag("scale_decoder_outputs", default=config.flag("tie_word_embeddings", default=True))
    if config.content["model_type"] == "mt5":
        is_scaled = False
    unscaled = "untied" if "lm_head.weight" in tensors else "tied-unscaled"
    return {
        "vocab": config.size("vocab_size", 32128),
        "dim": config.size("d_model", 512),
        "depth": depth,
        "decoder_depth": config.size("num_decoder_layers", depth),
        "heads": config.size("num_heads", 8),
        "head_dim": config.size("d_kv", 64),
        "ff_dim": config.size("d_ff", 2048),
        "activation": ACTIVATIONS[config.choice("feed_forward_proj", "relu", ACTIVATIONS)],
        "output": "tied" if is_scaled else unscaled,
        "buckets": config.size("relative_attention_num_buckets", 32),
        "max_distance": config.size("relative_attention_max_distance", 128),
        "norm_eps": config.number("layer_norm_epsilon", 1e-6),
        "dropout": config.number("dropout_rate", 0.1),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    output = keywords["output"]
    factor = 1.0 if output == "tied-unscaled" else keywords["dim"] ** -0.5
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
        depth = (keywords["decoder_depth"] if side == "decoder" else None) or keywords["depth"]
        for layer in range(depth):
            for number, branch in enumerate(branches):
                theirs, ours = f"{side}.block.{layer}.layer.{number}", f"{side}.{layer}.{branch}"
                yield same(f"{theirs}.layer_norm.weight", f"{ours}.pre_norm.weight")
                inner = f"{theirs}.{BRANCHES[branch]}"
                if branch == "ff":
                    for name, part in feed_forward.items():
                        yield same(f"{inner}.{name}.weight", f"{ours}.inner.{part}.weight")
                    continue
                yield same(f"{inner}.q.weight", f"{ours}.inner.q_proj.weight")
                yield same(f"{inner}.o.weight", f"{ours}.inner.out_proj.weight")
                yield stacked([f"{inner}.k.weight", f"{inner}.v.weight"], f"{ours}.inner.kv_proj.weight", kv_rows)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    depth = keywords["depth"]
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": keywords["vocab"],
        "d_model": keywords["dim"],
        "num_layers": depth,
        "num_decoder_layers": keywords["decoder_depth"] or depth,
        "num_heads": keywords["heads"],
        "d_kv": keywords["head_dim"],
        "d_ff": keywords["ff_dim"],
        "feed_forward_proj": keywords["activation"],
        "relative_attention_num_buckets": keywords["buckets"],
        "relative_attention_max_distance": keywords["max_distance"],
        "layer_norm_epsilon": keywords["norm_eps"],
        "dropout_rate": keywords["dropout"],
        "tie_word_embeddings": keywords["output"] == "tied",
    }


T5 = ModelFamily(
    title="T5",
    model_types=("t5", "mt5"),
    recipe="t5",
    prefix="",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "positions of attention to "
        "the source, which older versions stored and no version uses",
    },
)
"""Their tied outputs are multiplied by 1 / sqrt(dim); our embedding is stored so, and scaled back where it enters."""
