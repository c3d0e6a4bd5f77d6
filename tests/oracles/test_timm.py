"""ViT and MLP-Mixer of `timm` with copied weights: same outputs, same gradients.

timm needs a torchvision of the same build as torch. Where torchvision was built for another one, its operators are
missing; nothing here calls them, so their names are enough.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mapping import gradients_of, weights_of
from pairs import shaken
from test_mixers import pixels_last, renamed
from test_transformers import assert_near, assert_same_gradients
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn.batches import ImageClassificationBatch

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WHY = "timm is not installed (pip install timm, and the torchvision that goes with torch)"
NAMES = torch.library.Library("torchvision", "FRAGMENT")
CLASSES, SIZE, PATCH, DIM, DEPTH, HEADS = 5, 12, 4, 24, 2, 3
Tensors = Mapping[str, Tensor]


def installed() -> Any:
    """timm; importing it takes seconds, so that only its own tests do."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pytest.skip(WHY)
    except RuntimeError:
        for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
            NAMES.define(name)
    return pytest.importorskip("timm", reason=WHY)


def ends(theirs: Tensors, project: str) -> dict[str, Tensor]:
    """What stands before and after the layers."""
    ours = renamed(theirs, {project: "embed.project", "norm": "body.norm.inner", "head": "head"})
    return ours | {"embed.project.weight": pixels_last(theirs[f"{project}.weight"])}


def vit(theirs: Tensors) -> dict[str, Tensor]:
    """`VisionTransformer`; its queries, keys and values are packed in this order."""
    ours, names = ends(theirs, "patch_embed.proj"), {}
    ours["embed.leading"], ours["embed.position.weight"] = theirs["cls_token"][0], theirs["pos_embed"][0]
    for i in range(DEPTH):
        old, new = f"blocks.{i}", f"body.{i}"
        names |= {f"{old}.norm1": f"{new}.attention.pre_norm", f"{old}.attn.proj": f"{new}.attention.inner.out_proj"}
        names |= channels(f"{old}.norm2", f"{old}.mlp", new)
        for kind in ("weight", "bias"):
            packed, inner = theirs[f"{old}.attn.qkv.{kind}"], f"{new}.attention.inner"
            ours[f"{inner}.q_proj.{kind}"], ours[f"{inner}.kv_proj.{kind}"] = packed[:DIM], packed[DIM:]
    return ours | renamed(theirs, names)


def mixer(theirs: Tensors) -> dict[str, Tensor]:
    """`MlpMixer`; along the patches it is half as wide as the stream, as ours is by default."""
    ours, names = ends(theirs, "stem.proj"), {}
    for i in range(DEPTH):
        old, new = f"blocks.{i}", f"body.{i}"
        names |= {f"{old}.norm1": f"{new}.mixer.pre_norm", f"{old}.mlp_tokens.fc1": f"{new}.mixer.inner.up"}
        names |= {f"{old}.mlp_tokens.fc2": f"{new}.mixer.inner.down"}
        names |= channels(f"{old}.norm2", f"{old}.mlp_channels", new)
    return ours | renamed(theirs, names)


def channels(norm: str, mlp: str, new: str) -> dict[str, str]:
    return {norm: f"{new}.ff.pre_norm", f"{mlp}.fc1": f"{new}.ff.inner.up", f"{mlp}.fc2": f"{new}.ff.inner.down"}


def pair(name: str) -> tuple[nn.Module, Any, Any]:
    """Theirs, ours, and what makes weights of the one those of the other."""
    timm = installed()
    common: dict[str, Any] = {"classes": CLASSES, "height": SIZE, "width": SIZE, "channels": 3, "patch": PATCH}
    common |= {"dim": DIM, "depth": DEPTH, "dropout": 0.0}
    sizes = {"img_size": SIZE, "patch_size": PATCH, "num_classes": CLASSES, "embed_dim": DIM}
    if name == "vit":
        reference = timm.models.vision_transformer.VisionTransformer(**sizes, depth=DEPTH, num_heads=HEADS)
        return reference, mf.build("vit", **common, heads=HEADS), vit
    return timm.models.mlp_mixer.MlpMixer(**sizes, num_blocks=DEPTH), mf.build("mlp-mixer", **common), mixer


@pytest.mark.parametrize("name", ["vit", "mlp-mixer"])
def test_outputs_and_gradients(name: str) -> None:
    reference, ours, convert = pair(name)
    reference, ours = shaken(reference).double().eval(), ours.double().eval()
    ours.load_state_dict(convert(weights_of(reference)))
    images = torch.randn(3, SIZE, SIZE, 3, dtype=torch.float64)
    labels = torch.tensor([0, 4, 2])
    logits = reference(images.permute(0, 3, 1, 2))
    assert_near(ours(images).logits, logits)
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    ours.loss(ImageClassificationBatch(images, labels)).total.backward()
    assert_same_gradients(ours, convert(gradients_of(reference)))
