"""The Vision Transformer (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021), and the recipe `vit`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    attention_projections,
    each_module,
    each_parameter,
)
from manyformer.conversion.hugging_face.families.bert import IMAGE_HEAD_OF_SUFFIX, read_head
from manyformer.conversion.hugging_face.hf_folder import HFConfig
from manyformer.models.image_classifier import PIXEL_SCALINGS

PREPROCESSOR = "preprocessor_config.json"
TEACHER = "DeiTForImageClassificationWithTeacher"

LAYER_NAMES = {
    "layernorm_before": "attention.pre_norm",
    "layernorm_after": "ff.pre_norm",
    "intermediate.dense": "ff.inner.up",
    "output.dense": "ff.inner.down",
}


def _read_head(config: HFConfig) -> Keywords:
    """The classes, and whether the head reads the token that learned from a teacher."""
    token = "none"
    if config.model_type == "deit":
        token = "unread"
        if config.content.get("architectures") == [TEACHER]:
            token = "read"
    return {"classes": read_head(config, IMAGE_HEAD_OF_SUFFIX)["classes"], "distillation_token": token}


def _write_head(title: str, keywords: Mapping[str, Any]) -> Keywords:
    token = keywords["distillation_token"]
    if (title == "DeiT") == (token == "none"):
        raise UserError(f"distillation_token is {token}, which a {title} does not have")
    return {"architectures": [TEACHER if token == "read" else f"{title}ForImageClassification"]}


def _read_image_size(config: HFConfig) -> Keywords:
    height, width = _image_size(config)
    return {"height": height, "width": width}


def _image_size(config: HFConfig) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    size = config.content.get("image_size", 224)
    sides = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or any(type(side) is not int or not 0 < side <= 1 << 16 for side in sides):
        raise UserError(
            f"{config.file}: image_size ({size!r:.60}) must be the side of an image, or its height and width"
        )
    return sides[0], sides[1]


def _pixel_scaling(config: HFConfig) -> str:
    """How pixels become numbers, as the preprocessor's file says, or else by the default of the family."""
    default = "symmetric"
    if config.model_type == "deit":
        default = "imagenet"
    file = config.file.with_name(PREPROCESSOR)
    if not file.exists():
        return default
    settings = HFConfig.read_file(file)
    for name, expected in {"do_rescale": True, "do_normalize": True}.items():
        settings.require(name, expected=expected, default=expected)
    factor = settings.number("rescale_factor", 1 / 255)
    mean, deviation = (settings.content.get(name) for name in ("image_mean", "image_std"))
    # a file may say only how images are resized
    if mean is None and deviation is None:
        return default
    # compared with a tolerance: files round the numbers of ImageNet differently
    for name, (known_mean, known_deviation) in PIXEL_SCALINGS.items():
        if _close(mean, known_mean) and _close(deviation, known_deviation) and abs(factor * 255 - 1) < 1e-3:
            return name
    raise UserError(
        f"{file}: image_mean ({mean!r:.60}) and image_std ({deviation!r:.60}) are those of no pixel_scaling: "
        f"{', '.join(PIXEL_SCALINGS)}"
    )


def _close(values: Any, known: Sequence[float]) -> bool:
    return (
        isinstance(values, list)
        and all(isinstance(value, int | float) for value in values)
        and len(values) in (1, len(known))
        and all(abs(value - values[number % len(values)]) < 1e-3 for number, value in enumerate(known))
    )


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    prefix = "deit"
    if keywords["distillation_token"] == "none":
        prefix = "vit"
    embeddings = f"{prefix}.embeddings"
    dim = keywords["dim"]
    tokens = [f"{embeddings}.cls_token"]
    if prefix == "deit":
        tokens.append(f"{embeddings}.distillation_token")
    # (1, 1, d) each, of which we have one table (tokens, d)
    yield TensorRule(
        tuple(tokens), ("embed.leading",), lambda x: [torch.cat(list(x), 1)[0]], lambda x: torch.split(x[0][None], 1, 1)
    )
    # (1, l, d) there
    positions = (f"{embeddings}.position_embeddings",), ("embed.position.weight",)
    yield TensorRule(*positions, lambda x: [x[0][0]], lambda x: [x[0][None]])
    projection = f"{embeddings}.patch_embeddings.projection"
    yield _patches(f"{projection}.weight", "embed.project.weight", keywords["patch"])
    yield from each_parameter(projection, "embed.project", ("bias",))
    for layer in range(keywords["depth"]):
        hf = f"{prefix}.encoder.layer.{layer}"
        ours = f"body.{layer}"
        inputs = [f"{hf}.attention.attention.{name}" for name in ("query", "key", "value")]
        projections = [*inputs, f"{hf}.attention.output.dense"]
        yield from attention_projections(projections, f"{ours}.attention.inner", [dim, dim])
        yield from each_module(hf, ours, LAYER_NAMES)
    yield from each_parameter(f"{prefix}.layernorm", "body.norm.inner")
    if keywords["distillation_token"] == "read":
        yield from _two_heads()
    else:
        yield from each_parameter("classifier", "head")


def _patches(hf: str, ours: str, patch: int) -> TensorRule:
    """A convolution (d, c, p, p) over patches as a projection of their values, channels last."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x[0].permute(0, 2, 3, 1).flatten(1)]

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x[0].reshape(len(x[0]), patch, patch, -1).permute(0, 3, 1, 2)]

    return TensorRule((hf,), (ours,), to_ours, to_hf)


def _two_heads() -> Iterator[TensorRule]:
    """The mean of the heads of both tokens, as one head that reads both."""
    heads = "cls_classifier", "distillation_classifier"

    def halves(x: Sequence[Tensor]) -> Sequence[Tensor]:
        # one matrix over both tokens side by side: half of each head, so that their sum is the mean
        return [torch.cat(list(x), 1) / 2]

    def doubles(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return (2 * x[0]).chunk(2, 1)

    yield TensorRule(tuple(f"{head}.weight" for head in heads), ("head.weight",), halves, doubles)
    biases = tuple(f"{head}.bias" for head in heads)
    yield TensorRule(biases, ("head.bias",), lambda x: [(x[0] + x[1]) / 2], lambda x: [x[0], x[0]])


def _preprocessor(keywords: Mapping[str, Any]) -> dict[str, Keywords]:
    shape = (keywords["height"], keywords["width"], keywords["channels"])
    return preprocessor_files(shape, keywords["pixel_scaling"])


def preprocessor_files(shape: tuple[int, int, int], pixel_scaling: str) -> dict[str, Keywords]:
    """The file that says how the pixels of images (height, width, channels) become numbers."""
    mean, deviation = PIXEL_SCALINGS[pixel_scaling]
    height, width, channels = shape
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean[:channels]),
        "image_std": list(deviation[:channels]),
    }
    return {PREPROCESSOR: settings}


def _family(name: str, title: str) -> ModelFamily:
    """The family whose classes have a name, with a longer title."""
    model_type = name.lower()
    return ModelFamily(
        title=title,
        model_types=(model_type,),
        recipe="vit",
        prefix=f"{model_type}.",
        config_rules=(
            rules.demanded("a ViT", positions="learned", pool="first"),
            rules.fixed(hidden_act="gelu", qkv_bias=True),
            rules.written(model_type=model_type),
            ConfigRule(_read_head, lambda keywords: _write_head(name, keywords)),
            ConfigRule(_read_image_size, lambda keywords: {"image_size": [keywords["height"], keywords["width"]]}),
            rules.size("num_channels", "channels", 3),
            rules.size("patch_size", "patch", 16),
            rules.size("hidden_size", "dim", 768),
            rules.size("num_hidden_layers", "depth", 12),
            rules.size("num_attention_heads", "heads", 12),
            rules.size("intermediate_size", "ff_dim", 3072),
            rules.number("hidden_dropout_prob", "dropout", 0.0),
            rules.copied("attention_probs_dropout_prob", "attention_dropout"),
            rules.number("layer_norm_eps", "norm_eps", 1e-12),
            ConfigRule(lambda config: {"pixel_scaling": _pixel_scaling(config)}, lambda keywords: {}),
        ),
        tensor_rules=_tensor_rules,
        other_files=_preprocessor,
        head_is_optional=True,
        left_out={
            rf"{model_type}\.embeddings\.mask_token": "a vector for masked patches, which pretraining alone uses",
            rf"{model_type}\.pooler\.dense\.(weight|bias)": "a dense layer that this head does not use",
        },
    )


FAMILIES = (_family("ViT", "Vision Transformer"), _family("DeiT", "DeiT"))
"""Weights have the names of files, which `transformers` changes when it reads them."""
