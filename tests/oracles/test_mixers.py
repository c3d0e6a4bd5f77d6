"""FNet and ViT of `transformers`, gMLP and MLP-Mixer of their best-known packages: same outputs, same gradients."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from g_mlp_pytorch import gMLP
from mapping import gradients_of, weights_of
from mlp_mixer_pytorch import MLPMixer
from pairs import shaken
from test_transformers import assert_near, assert_same_gradients
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn.batches import ImageClassificationBatch, MaskedLMBatch

pytestmark = pytest.mark.oracle

VOCAB, DIM, DEPTH, HEADS, HIDDEN, LONGEST = 53, 32, 3, 4, 80, 24
HEIGHT, WIDTH, PATCH, CLASSES = 12, 12, 4, 7
Tensors = Mapping[str, Tensor]


def renamed(theirs: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {f"{new}.{kind}": theirs[f"{old}.{kind}"] for old, new in names.items() for kind in ("weight", "bias")}


def from_fnet(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.FNetForMaskedLM`, whose sentence types begin at 0."""
    token = theirs["fnet.embeddings.word_embeddings.weight"]
    ours = {"embed.token.weight": token, "head.weight": token, "head.bias": theirs["cls.predictions.bias"]}
    ours["embed.position.weight"] = theirs["fnet.embeddings.position_embeddings.weight"]
    ours["embed.types.weight"] = theirs["fnet.embeddings.token_type_embeddings.weight"]
    names = {
        "fnet.embeddings.LayerNorm": "embed.norm.0",
        "fnet.embeddings.projection": "embed.norm.1",
        "cls.predictions.transform.dense": "head.transform.0",
        "cls.predictions.transform.LayerNorm": "head.transform.2",
    }
    for i in range(DEPTH):
        old, new = f"fnet.encoder.layer.{i}", f"body.{i}"
        names |= {
            f"{old}.fourier.output.LayerNorm": f"{new}.mixer.post_norm",
            f"{old}.intermediate.dense": f"{new}.ff.inner.up",
            f"{old}.output.dense": f"{new}.ff.inner.down",
            f"{old}.output.LayerNorm": f"{new}.ff.post_norm",
        }
    return ours | renamed(theirs, names)


def from_vit(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.ViTForImageClassification`; its patches are projected by a convolution."""
    ours = {"embed.project.weight": pixels_last(theirs["vit.embeddings.patch_embeddings.projection.weight"])}
    ours["embed.project.bias"] = theirs["vit.embeddings.patch_embeddings.projection.bias"]
    ours["embed.leading"] = theirs["vit.embeddings.cls_token"][0]
    ours["embed.position.weight"] = theirs["vit.embeddings.position_embeddings"][0]
    names = {"vit.layernorm": "body.norm.inner", "classifier": "head"}
    for i in range(DEPTH):
        old, new = f"vit.layers.{i}", f"body.{i}"
        for kind in ("weight", "bias"):
            q, k, v, o = (theirs[f"{old}.attention.{name}_proj.{kind}"] for name in "qkvo")
            inner = f"{new}.attention.inner"
            ours |= {
                f"{inner}.q_proj.{kind}": q,
                f"{inner}.kv_proj.{kind}": torch.cat([k, v]),
                f"{inner}.out_proj.{kind}": o,
            }
        names |= {
            f"{old}.layernorm_before": f"{new}.attention.pre_norm",
            f"{old}.layernorm_after": f"{new}.ff.pre_norm",
            f"{old}.mlp.fc1": f"{new}.ff.inner.up",
            f"{old}.mlp.fc2": f"{new}.ff.inner.down",
        }
    return ours | renamed(theirs, names)


def pixels_last(weight: Tensor) -> Tensor:
    """A convolution's weight (d, c, p, q) as that of a projection of patches whose pixels have their channels last."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def from_gmlp(theirs: Tensors) -> dict[str, Tensor]:
    """`g_mlp_pytorch.gMLP`; its attention has no bias coming in, and its output is a projection of its own."""
    ours = {"embed.token.weight": theirs["to_embed.weight"]}
    names = {"to_logits.0": "body.norm.inner"}
    for i in range(DEPTH):
        old, new = f"layers.{i}.fn", f"body.{i}.mixer"
        names |= {
            f"{old}.norm": f"{new}.pre_norm",
            f"{old}.fn.fn.proj_in.0": f"{new}.inner.up",
            f"{old}.fn.fn.sgu.norm": f"{new}.inner.norm",
            f"{old}.fn.fn.proj_out": f"{new}.inner.down",
        }
        ours[f"{new}.inner.weights.weight"] = theirs[f"{old}.fn.fn.sgu.weight"]
        ours[f"{new}.inner.bias"] = theirs[f"{old}.fn.fn.sgu.bias"][0]
        if f"{old}.fn.fn.attn.to_qkv.weight" in theirs:
            packed, inner = theirs[f"{old}.fn.fn.attn.to_qkv.weight"], f"{new}.inner.attention"
            ours[f"{inner}.q_proj.weight"], ours[f"{inner}.kv_proj.weight"] = packed.split(
                [len(packed) // 3, len(packed) * 2 // 3]
            )
            names[f"{old}.fn.fn.attn.to_out"] = f"{inner}.out_proj"
    return ours | renamed(theirs, names)


def from_mixer(theirs: Tensors) -> dict[str, Tensor]:
    """`mlp_mixer_pytorch.MLPMixer`; along the patches it convolves, with a width of 1."""
    names = {"1": "embed.project", f"{DEPTH + 2}": "body.norm.inner", f"{DEPTH + 4}": "head"}
    ours: dict[str, Tensor] = {}
    for i in range(DEPTH):
        old, new = f"{i + 2}", f"body.{i}"
        names |= {f"{old}.0.norm": f"{new}.mixer.pre_norm", f"{old}.1.norm": f"{new}.ff.pre_norm"}
        for theirs_name, name in (("0", "up"), ("3", "down")):
            names[f"{old}.1.fn.{theirs_name}"] = f"{new}.ff.inner.{name}"
            ours[f"{new}.mixer.inner.{name}.weight"] = theirs[f"{old}.0.fn.{theirs_name}.weight"].squeeze(-1)
            ours[f"{new}.mixer.inner.{name}.bias"] = theirs[f"{old}.0.fn.{theirs_name}.bias"]
    return ours | renamed(theirs, names)


def with_epsilon(module: nn.Module, eps: float) -> Any:
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = eps
    return module


@pytest.fixture(scope="module", name="fnets")
def fnet_pair() -> tuple[Any, Any]:
    from transformers import FNetConfig, FNetForMaskedLM

    torch.manual_seed(5)
    config = FNetConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        intermediate_size=HIDDEN,
        hidden_act="gelu",
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        pad_token_id=0,
    )
    reference = shaken(FNetForMaskedLM(config))
    sizes = {"dim": DIM, "depth": DEPTH, "ff_dim": HIDDEN, "max_length": LONGEST, "sentence_types": 4}
    ours = mf.build("fnet", vocab=VOCAB, **sizes, dropout=0.0)
    ours.load_state_dict(from_fnet(weights_of(reference)))
    return ours, reference


@pytest.mark.parametrize("length", [1, 2, 17, LONGEST])
def test_fnet(fnets: tuple[Any, Any], length: int) -> None:
    ours, reference = fnets
    tokens, types = torch.randint(3, VOCAB, (3, length)), torch.randint(4, (3, length))
    with torch.no_grad():
        assert_near(ours(tokens).logits, reference(tokens).logits)
        assert_near(ours(tokens, parts=types).logits, reference(tokens, token_type_ids=types).logits)


def test_fnet_gradients(fnets: tuple[Any, Any]) -> None:
    ours, reference = fnets
    tokens = torch.randint(3, VOCAB, (3, 15))
    targets = torch.where(torch.rand(3, 15) < 0.4, tokens, -100)
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(MaskedLMBatch(tokens, targets))
    loss.total.div(loss.targets).backward()
    reference(tokens, labels=targets).loss.backward()
    assert_same_gradients(ours, from_fnet(gradients_of(reference)))


@pytest.fixture(scope="module", name="vits")
def vit_pair() -> tuple[Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(6)
    config = ViTConfig(
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        image_size=HEIGHT,
        patch_size=PATCH,
        num_labels=CLASSES,
        layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0,
    )
    reference = shaken(ViTForImageClassification(config))
    sizes = {"height": HEIGHT, "width": WIDTH, "patch": PATCH, "classes": CLASSES}
    ours = mf.build("vit", **sizes, dim=DIM, depth=DEPTH, heads=HEADS, ff_dim=HIDDEN, dropout=0.0)
    ours.load_state_dict(from_vit(weights_of(reference)))
    return ours, reference


def pictures(rows: int = 3) -> tuple[Tensor, Tensor]:
    """Bytes for us, and what they stand for, channels first, for everybody else."""
    images = torch.randint(0, 256, (rows, HEIGHT, WIDTH, 3), dtype=torch.uint8)
    return images, (images.float() / 127.5 - 1).permute(0, 3, 1, 2)


def test_vit(vits: tuple[Any, Any]) -> None:
    ours, reference = vits
    images, values = pictures()
    with torch.no_grad():
        assert_near(ours(images).logits, reference(values).logits)


def test_vit_gradients(vits: tuple[Any, Any]) -> None:
    ours, reference = vits
    images, values = pictures()
    labels = torch.tensor([0, 6, 2])
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(ImageClassificationBatch(images, labels))
    loss.total.div(loss.targets).backward()
    reference(values, labels=labels).loss.backward()
    assert_same_gradients(ours, from_vit(gradients_of(reference)))


def gmlp_pair(*, causal: bool, attention: int | None) -> tuple[Any, Any]:
    torch.manual_seed(7)
    reference = gMLP(
        num_tokens=VOCAB, dim=DIM, depth=DEPTH, seq_len=LONGEST, ff_mult=2, attn_dim=attention, causal=causal
    )
    shaken(reference)
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "ff_dim": 2 * DIM, "max_length": LONGEST}
    ours: Any = mf.build("gmlp" if causal else "gmlp-encoder", **sizes, weights="table", attention_dim=attention)
    # theirs has a projection of its own, with a bias, where we have the embedding's matrix
    ours.head = nn.Linear(DIM, VOCAB)
    mapped = from_gmlp(weights_of(reference)) | renamed(weights_of(reference), {"to_logits.1": "head"})
    for name, value in ours.state_dict().items():
        if "attention" in name and name not in mapped:
            assert name.endswith("bias")
            mapped[name] = torch.zeros_like(value)
    ours.load_state_dict(mapped)
    return ours.eval(), reference


@pytest.mark.parametrize("attention", [None, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_gmlp(causal: bool, attention: int | None) -> None:
    ours, reference = gmlp_pair(causal=causal, attention=attention)
    # theirs takes shorter rows only where it is causal
    for length in (1, 17, LONGEST) if causal else (LONGEST,):
        tokens = torch.randint(0, VOCAB, (3, length))
        mine, yours = ours(tokens).logits, reference(tokens)
        assert_near(mine, yours)
    weight = torch.randn_like(mine)
    (mine * weight).sum().backward()
    (yours * weight).sum().backward()
    gradients = gradients_of(reference)
    expected = from_gmlp(gradients) | renamed(gradients, {"to_logits.1": "head"})
    for name, value in ours.named_parameters():
        if name in expected:
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(value.grad, expected[name], atol=1e-5 * largest + 1e-6, rtol=1e-4)


@pytest.fixture(scope="module", name="mixers")
def mixer_pair() -> tuple[Any, Any]:
    torch.manual_seed(8)
    reference = MLPMixer(
        image_size=HEIGHT,
        channels=3,
        patch_size=PATCH,
        dim=DIM,
        depth=DEPTH,
        num_classes=CLASSES,
        expansion_factor=0.75,
        expansion_factor_token=2.5,
    )
    with_epsilon(shaken(reference), 1e-6)
    sizes = {"height": HEIGHT, "width": WIDTH, "patch": PATCH, "classes": CLASSES, "token_mlp_dim": 24, "ff_dim": 80}
    ours = mf.build("mlp-mixer", **sizes, dim=DIM, depth=DEPTH)
    ours.load_state_dict(from_mixer(weights_of(reference)))
    return ours, reference


def test_mlp_mixer(mixers: tuple[Any, Any]) -> None:
    ours, reference = mixers
    images, values = pictures()
    with torch.no_grad():
        assert_near(ours(images).logits, reference(values))


def test_mlp_mixer_gradients(mixers: tuple[Any, Any]) -> None:
    ours, reference = mixers
    images, values = pictures()
    labels = torch.tensor([0, 6, 2])
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(ImageClassificationBatch(images, labels))
    loss.total.div(loss.targets).backward()
    torch.nn.functional.cross_entropy(reference(values), labels).backward()
    assert_same_gradients(ours, from_mixer(gradients_of(reference)))


def test_sizes_of_the_papers() -> None:
    """ViT-B/16 has 86,567,656 parameters, Mixer-B/16 59,880,472, as the published code counts them."""
    with torch.device("meta"):
        for name, count in (("vit", 86_567_656), ("mlp-mixer", 59_880_472)):
            assert sum(value.numel() for value in mf.build(name).parameters()) == count
