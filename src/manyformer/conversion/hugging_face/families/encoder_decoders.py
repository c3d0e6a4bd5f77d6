"""Encoder-decoders: BART (Lewis et al. 2020), mBART, Marian and Pegasus, whose recipe is `transformer`, and T5.

T5 (Raffel et al. 2020), T5 1.1, Flan-T5 and mT5 have the recipe `t5`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    WEIGHT,
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    attention_projections,
    each_module,
    each_parameter,
    padded_rows,
    reshaped,
    same,
    scaled,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig


def _decoder_depth(keywords: Mapping[str, Any]) -> int:
    """The number of layers of the decoder, by default that of the encoder."""
    return int(keywords["decoder_depth"] or keywords["depth"])


BART_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}
UNUSED_POSITIONS = 2
"""Rows of BART's table of positions before that of the first token."""


class EncoderDecoderClass(NamedTuple):
    """What tells the classes apart: their name, and the keywords that are fixed in their code."""

    architecture: str
    fixed: Mapping[str, Any]


BART_CLASSES = {
    "bart": EncoderDecoderClass(
        "BartForConditionalGeneration", {"position": "learned", "embedding_norm": True, "norm_order": "post"}
    ),
    "mbart": EncoderDecoderClass(
        "MBartForConditionalGeneration", {"position": "learned", "embedding_norm": True, "norm_order": "pre"}
    ),
    "marian": EncoderDecoderClass(
        "MarianMTModel", {"position": "sinusoid-halves", "embedding_norm": False, "norm_order": "post"}
    ),
    "pegasus": EncoderDecoderClass(
        "PegasusForConditionalGeneration", {"position": "sinusoid-halves", "embedding_norm": False, "norm_order": "pre"}
    ),
}


def _read_bart_class(config: HFConfig) -> Keywords:
    heads = config.size("encoder_attention_heads", 16)
    config.require("decoder_attention_heads", expected=heads, default=16)
    return {"output_bias": "final_logits_bias" in config.tensors, **BART_CLASSES[config.model_type].fixed}


def _write_bart_class(keywords: Mapping[str, Any]) -> Keywords:
    for name in ("kernel", "encoder_kernel", "decoder_kernel", "cross_kernel"):
        if keywords[name] not in ("softmax", None):
            raise UserError(f"{name} is {keywords[name]}, and encoder-decoders of transformers have softmax alone")
    model_type = _model_type(keywords)
    fields = {"model_type": model_type, "architectures": [BART_CLASSES[model_type].architecture]}
    return {**fields, "decoder_attention_heads": keywords["heads"]}


def _model_type(keywords: Mapping[str, Any]) -> str:
    """The type of the models that have these keywords. Raises UserError if there are none."""
    for model_type, form in BART_CLASSES.items():
        if all(keywords[name] == value for name, value in form.fixed.items()):
            return model_type
    chosen = ", ".join(f"{name}={keywords[name]}" for name in BART_CLASSES["bart"].fixed)
    raise UserError(
        f"no class of transformers has {chosen}: BART and mBART have learned positions with a norm of the embedding, "
        "Marian and Pegasus position=sinusoid-halves without one"
    )


def _read_vocabularies(config: HFConfig) -> Keywords:
    vocab = config.size("vocab_size", 50265)
    # some Marian models have a vocabulary for each language
    if config.flag("share_encoder_decoder_embeddings", default=True):
        return {"vocab": vocab, "source_vocab": None}
    return {"vocab": config.size("decoder_vocab_size", vocab), "source_vocab": vocab}


def _write_vocabularies(keywords: Mapping[str, Any]) -> Keywords:
    vocab = keywords["vocab"]
    source_vocab = keywords["source_vocab"]
    model_type = _model_type(keywords)
    fields: Keywords = {"vocab_size": source_vocab or vocab}
    if model_type == "marian":
        return {**fields, "decoder_vocab_size": vocab, "share_encoder_decoder_embeddings": source_vocab is None}
    if source_vocab is not None:
        raise UserError(
            f"source_vocab is {source_vocab}, and a {BART_CLASSES[model_type].architecture} has one vocabulary"
        )
    return fields


def _bart_tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    vocab = keywords["vocab"]
    dim = keywords["dim"]
    is_learned = keywords["position"] == "learned"
    if keywords["source_vocab"] is None:
        yield same("model.shared.weight", "embed_target.token.weight")
    else:
        yield same("model.encoder.embed_tokens.weight", "embed_source.token.weight")
        yield same("model.decoder.embed_tokens.weight", "embed_target.token.weight")
    if keywords["output_bias"]:
        yield reshaped("final_logits_bias", "head.bias", (1, vocab), (vocab,))
    for side, embed in {"encoder": "embed_source", "decoder": "embed_target"}.items():
        hf = f"model.{side}"
        # sinusoids are computed, so nothing is stored for them
        if is_learned:
            table = f"{hf}.embed_positions.weight"
            yield padded_rows(table, f"{embed}.position.weight", UNUSED_POSITIONS)
        if keywords["embedding_norm"]:
            yield from each_parameter(f"{hf}.layernorm_embedding", f"{embed}.norm")
        # only a pre-norm side ends in a norm of its own
        if keywords["norm_order"] == "pre":
            yield from each_parameter(f"{hf}.layer_norm", f"{side}.norm.inner")
        if side == "decoder":
            depth = _decoder_depth(keywords)
        else:
            depth = keywords["depth"]
        for layer in range(depth):
            yield from _bart_layer_rules(
                f"{hf}.layers.{layer}", f"{side}.{layer}", dim, f"{keywords['norm_order']}_norm"
            )


def _bart_layer_rules(hf: str, ours: str, dim: int, norm: str) -> Iterator[TensorRule]:
    branches = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if ours.startswith("decoder") else {})
    for name, branch in branches.items():
        projections = [f"{hf}.{name}.{part}_proj" for part in ("q", "k", "v", "out")]
        yield from attention_projections(projections, f"{ours}.{branch}.inner", [dim, dim])
        yield from each_parameter(f"{hf}.{name}_layer_norm", f"{ours}.{branch}.{norm}")
    yield from each_module(hf, f"{ours}.ff", {"fc1": "inner.up", "fc2": "inner.down", "final_layer_norm": norm})


BART = ModelFamily(
    title="BART",
    model_types=tuple(BART_CLASSES),
    recipe="transformer",
    prefix="model.",
    config_rules=(
        ConfigRule(_read_bart_class, _write_bart_class),
        ConfigRule(_read_vocabularies, _write_vocabularies),
        rules.written(is_encoder_decoder=True),
        rules.fixed(tie_word_embeddings=True),
        rules.size("d_model", "dim", 1024),
        rules.size("encoder_layers", "depth", 12),
        rules.setting(
            "decoder_layers", "decoder_depth", lambda config: config.size("decoder_layers", 12), _decoder_depth
        ),
        rules.size("encoder_attention_heads", "heads", 16),
        rules.size("encoder_ffn_dim", "ff_dim", 4096),
        rules.setting(
            "decoder_ffn_dim",
            "decoder_ff_dim",
            lambda config: config.size("decoder_ffn_dim", 4096),
            lambda keywords: keywords["decoder_ff_dim"] or keywords["ff_dim"],
        ),
        rules.size("max_position_embeddings", "max_length", 1024),
        rules.number("dropout", "dropout", 0.1),
        rules.copied("attention_dropout", "attention_dropout"),
        rules.choice("activation_function", "activation", "gelu", BART_ACTIVATIONS),
        rules.flag("scale_embedding", "scaled_embedding", default=False),
    ),
    tensor_rules=_bart_tensor_rules,
    left_out={
        r"lm_head\.weight|model\.(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"model\.(encoder|decoder)\.embed_positions\.weight": "sines and cosines, which are computed",
    },
)
"""Positions of BART and mBART begin with row 2 of their tables; norms are after branches in BART and Marian."""


T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gated-gelu", "gated-gelu_new": "gated-gelu"}

T5_BRANCHES = {"attention": "SelfAttention", "cross": "EncDecAttention", "ff": "DenseReluDense"}
"""From the branches of a layer, in their order, to the names of the modules in T5."""


def _t5_output(config: HFConfig) -> str:
    """Whether the output is the embedding, and scaled as in the first T5."""
    # in files without the field a tied output is a scaled one
    is_scaled = config.flag("scale_decoder_outputs", default=config.flag("tie_word_embeddings", default=True))
    if is_scaled and config.model_type != "mt5":
        return "tied"
    if "lm_head.weight" in config.tensors:
        return "untied"
    return "tied-unscaled"


def _t5_tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
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
        # stored in the first layer, and shared by all others
        yield same(table, f"{side}.0.attention.inner.position.weight")
        branches = [branch for branch in T5_BRANCHES if side == "decoder" or branch != "cross"]
        if side == "decoder":
            depth = _decoder_depth(keywords)
        else:
            depth = keywords["depth"]
        for layer in range(depth):
            for place, branch in enumerate(branches):
                hf = f"{side}.block.{layer}.layer.{place}"
                ours = f"{side}.{layer}.{branch}"
                yield same(f"{hf}.layer_norm.weight", f"{ours}.pre_norm.weight")
                inner = f"{hf}.{T5_BRANCHES[branch]}"
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
        rules.choice("feed_forward_proj", "activation", "relu", T5_ACTIVATIONS),
        rules.setting("tie_word_embeddings", "output", _t5_output, lambda keywords: keywords["output"] == "tied"),
        rules.size("relative_attention_num_buckets", "buckets", 32),
        rules.size("relative_attention_max_distance", "max_distance", 128),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-6),
        rules.number("dropout_rate", "dropout", 0.1),
    ),
    tensor_rules=_t5_tensor_rules,
    left_out={
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "positions of attention to "
        "the source, which older versions stored and no version uses",
    },
)
"""Tied outputs of T5 are multiplied by 1 / sqrt(dim); our embedding is stored so, and scaled back where it enters."""

FAMILIES = (BART, T5)
