"""Conformer layers of `transformers` with copied weights: same outputs, same gradients, same running means."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mapping import gradients_of, weights_of
from pairs import shaken
from test_transformers import assert_near, assert_same_gradients
from torch import Tensor

from manyformer.nn.core import Chain, Context, contiguous_positions
from manyformer.recipes.conformer import DistanceKind, conformer_layer

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

DIM, DEPTH, HEADS, HIDDEN, KERNEL = 24, 2, 3, 40, 5
NAMES = {
    "ffn1_layer_norm": "first_ff.pre_norm",
    "ffn1.intermediate_dense": "first_ff.inner.up",
    "ffn1.output_dense": "first_ff.inner.down",
    "self_attn_layer_norm": "attention.pre_norm",
    "self_attn.linear_q": "attention.inner.q_proj",
    "self_attn.linear_out": "attention.inner.out_proj",
    "conv_module.layer_norm": "convolution.pre_norm",
    "conv_module.batch_norm": "convolution.inner.norm",
    "ffn2_layer_norm": "second_ff.pre_norm",
    "ffn2.intermediate_dense": "second_ff.inner.up",
    "ffn2.output_dense": "second_ff.inner.down",
    "final_layer_norm": "second_ff.post_norm",
}


def conformer_tensors(theirs: Mapping[str, Tensor], positions: DistanceKind) -> dict[str, Tensor]:
    """The tensors of `Wav2Vec2ConformerEncoder.layers` under our names."""
    ours: dict[str, Tensor] = {}
    for number in range(DEPTH):
        layer = {name.partition(f"{number}.")[2]: x for name, x in theirs.items() if name.startswith(f"{number}.")}
        for old, new in NAMES.items():
            ours |= {
                f"{number}.{new}.{name.removeprefix(f'{old}.')}": x
                for name, x in layer.items()
                if name.startswith(f"{old}.")
            }
        attention, module = f"{number}.attention.inner", f"{number}.convolution.inner"
        for kind in ("weight", "bias"):
            parts = [layer[f"self_attn.linear_{part}.{kind}"] for part in "kv"]
            ours[f"{attention}.kv_proj.{kind}"] = torch.cat(parts)
        if positions == "xl":
            ours[f"{attention}.position.biases.u"] = layer["self_attn.pos_bias_u"]
            ours[f"{attention}.position.biases.v"] = layer["self_attn.pos_bias_v"]
            # their sines and cosines alternate, ours are two halves
            order = [*range(0, DIM, 2), *range(1, DIM, 2)]
            ours[f"{attention}.position.r_proj.weight"] = layer["self_attn.linear_pos.weight"][:, order]
        ours[f"{module}.gate_and_up.weight"] = layer["conv_module.pointwise_conv1.weight"][..., 0]
        ours[f"{module}.down.weight"] = layer["conv_module.pointwise_conv2.weight"][..., 0]
        ours[f"{module}.depthwise"] = layer["conv_module.depthwise_conv.weight"][:, 0].T
    return ours


def encoder_pair(positions: DistanceKind) -> tuple[Any, Any]:
    """Our layers, and their encoder, with the same weights in float64."""
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    torch.manual_seed(3)
    config = Wav2Vec2ConformerConfig(
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        conv_depthwise_kernel_size=KERNEL,
        position_embeddings_type="relative" if positions == "xl" else None,
        attention_dropout=0.0,
        activation_dropout=0.0,
        hidden_dropout=0.0,
        conformer_conv_dropout=0.0,
        layerdrop=0.0,
        num_conv_pos_embedding_groups=HEADS,
        hidden_act="silu",
        attn_implementation="eager",
    )
    reference = shaken(Wav2Vec2ConformerEncoder(config)).double()
    make_layer = conformer_layer(DIM, HEADS, HIDDEN, KERNEL, positions=positions)
    ours = Chain(**{str(number): make_layer() for number in range(DEPTH)}).double().eval()
    ours.load_state_dict(conformer_tensors(weights_of(reference.layers), positions))
    return ours, reference


def outputs(ours: Any, theirs: Any, length: int) -> tuple[Tensor, Tensor]:
    """What both make of the same sequence; their encoder ends in a norm, which ours does not have."""
    x = torch.randn(2, length, DIM, dtype=torch.float64)
    positions = contiguous_positions(2, 0, length, x.device)
    return theirs.layer_norm(ours(x, Context(positions)).y), theirs(x.clone()).last_hidden_state


@pytest.mark.parametrize("positions", ["xl", "none"])
@pytest.mark.parametrize("length", [1, 7, 150])
def test_layers(positions: DistanceKind, length: int) -> None:
    assert_near(*outputs(*encoder_pair(positions), length))


@pytest.mark.parametrize("positions", ["xl", "none"])
def test_training(positions: DistanceKind) -> None:
    ours, reference = encoder_pair(positions)
    ours.train(), reference.train()
    actual, expected = outputs(ours, reference, 33)
    assert_near(actual, expected)
    weight = torch.randn_like(expected)
    (actual * weight).sum().backward()
    ours_gradients = {name: x.grad for name, x in ours.named_parameters()}
    reference.zero_grad()
    (expected * weight).sum().backward()
    mapped = conformer_tensors({**weights_of(reference.layers), **gradients_of(reference.layers)}, positions)
    assert all(gradient is not None for gradient in ours_gradients.values())
    assert_same_gradients(ours, {name: mapped[name] for name in ours_gradients})
    buffers = conformer_tensors(weights_of(reference.layers), positions)
    for name, value in ours.named_buffers():
        torch.testing.assert_close(value, buffers[name])
