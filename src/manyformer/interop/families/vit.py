"""The Vision Transformer (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021), and the recipe `vit`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.interop.families.encoder_parts import IMAGE_HEAD_OF_SUFFIX, read_head
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import PARAMETERS, TensorRule, each_parameter, stacked
from manyformer.models.patch_embedding import PIXEL_SCALINGS

PREPROCESSOR = "preprocessor_config.json"
TEACHER = "DeiTForImageClassificationWithTeacher"


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in {"hidden_act": "gelu", "qkv_bias": True}.items():
        config.require(name, expected=expected, default=expected)
    height, width = _image_size(config)
    is_deit = config.content["model_type"] == "deit"
    has_teacher = config.content.get("architectures") == [TEACHER]
    return {
        "classes": read_head(config, IMAGE_HEAD_OF_SUFFIX)["classes"],
        "height": height,
        "width": width,
        "channels": config.size("num_channels", 3),
        "patch": config.size("patch_size", 16),
        "dim": config.size("hidden_size", 768),
        "depth": config.size("num_hidden_layers", 12),
        "heads": config.size("num_attention_heads", 12),
        "ff_dim": config.size("intermediate_size", 3072),
        "dropout": config.number("hidden_dropout_prob", 0.0),
        "norm_eps": config.number("layer_norm_eps", 1e-12),
        "distillation_token": "none" if not is_deit else "read" if has_teacher else "unread",
        "pixel_scaling": _pixel_scaling(config, is_deit=is_deit),
    }


def _image_size(config: ForeignConfig) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    size = config.content.get("image_size", 224)
    sides = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or any(type(side) is not int or not 0 < side <= 1 << 16 for side in sides):
        raise UserError(
            f"{config.file}: image_size ({size!r:.60}) must be the side of an image, or its height and width"
        )
    return sides[0], sides[1]


def _pixel_scaling(config: ForeignConfig, *, is_deit: bool) -> str:
    """How pixels become numbers, as the preprocessor's file says, or else by the default of the family."""
    default = "imagenet" if is_deit else "symmetric"
    file = config.file.with_name(PREPROCESSOR)
    if not file.exists():
        return default
    settings = ForeignConfig.read_file(file)
    for name, expected in {"do_rescale": True, "do_normalize": True}.items():
        settings.require(name, expected=expected, default=expected)
    factor = settings.number("rescale_factor", 1 / 255)
    mean, deviation = (settings.content.get(name) for name in ("image_mean", "image_std"))
    if mean is None and deviation is None:
        return default
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


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    prefix = "vit" if keywords["distillation_token"] == "none" else "deit"
    embeddings, dim = f"{prefix}.embeddings", keywords["dim"]
    tokens = [f"{embeddings}.cls_token"]
    if prefix == "deit":
        tokens.append(f"{embeddings}.distillation_token")
    yield TensorRule(
        tuple(tokens), ("embed.leading",), lambda x: [torch.cat(list(x), 1)[0]], lambda x: torch.split(x[0][None], 1, 1)
    )
    positions = (f"{embeddings}.position_embeddings",), ("embed.position.weight",)
    yield TensorRule(*positions, lambda x: [x[0][0]], lambda x: [x[0][None]])
    projection = f"{embeddings}.patch_embeddings.projection"
    yield _patches(f"{projection}.weight", "embed.project.weight", keywords["patch"])
    yield from each_parameter(projection, "embed.project", ("bias",))
    for layer in range(keywords["depth"]):
        theirs, ours = f"{prefix}.encoder.layer.{layer}", f"body.{layer}"
        attention = f"{theirs}.attention.attention"
        yield from each_parameter(f"{attention}.query", f"{ours}.attention.inner.q_proj")
        for kind in PARAMETERS:
            pair = [f"{attention}.key.{kind}", f"{attention}.value.{kind}"]
            yield stacked(pair, f"{ours}.attention.inner.kv_proj.{kind}", [dim, dim])
        for their_part, our_part in (
            ("attention.output.dense", "attention.inner.out_proj"),
            ("layernorm_before", "attention.pre_norm"),
            ("layernorm_after", "ff.pre_norm"),
            ("intermediate.dense", "ff.inner.up"),
            ("output.dense", "ff.inner.down"),
        ):
            yield from each_parameter(f"{theirs}.{their_part}", f"{ours}.{our_part}")
    yield from each_parameter(f"{prefix}.layernorm", "body.norm.inner")
    if keywords["distillation_token"] == "read":
        yield from _two_heads()
    else:
        yield from each_parameter("classifier", "head")


def _patches(theirs: str, ours: str, patch: int) -> TensorRule:
    """A convolution (d, c, p, p) over patches as a projection of their values, channels last."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x[0].permute(0, 2, 3, 1).flatten(1)]

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x[0].reshape(len(x[0]), patch, patch, -1).permute(0, 3, 1, 2)]

    return TensorRule((theirs,), (ours,), to_ours, to_theirs)


def _two_heads() -> Iterator[TensorRule]:
    """The mean of the heads of both tokens, as one head that reads both."""
    heads = "cls_classifier", "distillation_classifier"

    def halves(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(x), 1) / 2]

    def doubles(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return (2 * x[0]).chunk(2, 1)

    yield TensorRule(tuple(f"{head}.weight" for head in heads), ("head.weight",), halves, doubles)
    biases = tuple(f"{head}.bias" for head in heads)
    yield TensorRule(biases, ("head.bias",), lambda x: [(x[0] + x[1]) / 2], lambda x: [x[0], x[0]])


def _write_config(keywords: Mapping[str, Any], *, is_deit: bool) -> Keywords:
    for name, expected in {"positions": "learned", "pool": "first"}.items():
        if keywords[name] != expected:
            raise UserError(f"{name} is {keywords[name]}, and a ViT has {expected} alone")
    token = keywords["distillation_token"]
    if is_deit == (token == "none"):
        raise UserError(f"distillation_token is {token}, which a {'DeiT' if is_deit else 'ViT'} does not have")
    architecture = TEACHER if token == "read" else f"{'DeiT' if is_deit else 'ViT'}ForImageClassification"
    return {
        "architectures": [architecture],
        "model_type": "deit" if is_deit else "vit",
        "image_size": [keywords["height"], keywords["width"]],
        "num_channels": keywords["channels"],
        "patch_size": keywords["patch"],
        "hidden_size": keywords["dim"],
        "num_hidden_layers": keywords["depth"],
        "num_attention_heads": keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "hidden_act": "gelu",
        "hidden_dropout_prob": keywords["dropout"],
        "attention_probs_dropout_prob": keywords["attention_dropout"],
        "layer_norm_eps": keywords["norm_eps"],
        "qkv_bias": True,
    }


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


def _family(title: str, model_type: str) -> ModelFamily:
    is_deit = model_type == "deit"
    return ModelFamily(
        title=title,
        model_types=(model_type,),
        recipe="vit",
        prefix=f"{model_type}.",
        read_keywords=_read_keywords,
        rules=_rules,
        write_config=lambda keywords: _write_config(keywords, is_deit=is_deit),
        other_files=_preprocessor,
        head_is_optional=True,
        left_out={
            rf"{model_type}\.embeddings\.mask_token": "a vector for masked patches, which pretraining alone uses",
            rf"{model_type}\.pooler\.dense\.(weight|bias)": "a dense layer that this head does not use",
        },
    )


VIT, DEIT = _family("Vision Transformer", "vit"), _family("DeiT", "deit")
"""Weights have the names of files, which `transformers` changes when it reads them."""
