"""DeltaProduct's layer: Gated DeltaNet's with one step, in pieces, and with heads removed."""

import pytest
import torch
from torch import nn

import manyformer as mf
from layouts import ROWS, in_steps, place_of, real_of
from manyformer.nn.attention.head_gates import gated_heads
from manyformer.nn.core import Context
from manyformer.nn.recurrent.delta_product import DeltaProductAttention
from manyformer.nn.runtime.training_hooks import fused_row_parts
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, delta_product_attention

SIZES = {"vocab": 11, "dim": 12, "depth": 2, "heads": 3}


def make(steps: int = 3) -> DeltaProductAttention:
    torch.manual_seed(0)
    return delta_product_attention(RecurrentSizes.of(12, 3, 4, 2), steps).double()


def test_one_step_is_gated_deltanet_with_the_same_weights() -> None:
    ours = mf.build("deltaproduct", **SIZES, householder_steps=1)
    older = mf.build("gated-deltanet", **SIZES, negative_eigenvalues=True)
    older.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 11, (2, 70))
    torch.testing.assert_close(ours.double()(tokens).logits, older.double()(tokens).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * 23, [5, 1, 9, 8]], ids=["steps", "chunks"])
@pytest.mark.parametrize("layout", ["left padding", "packed"])
def test_a_stream_gives_what_one_pass_gives(layout: str, sizes: list[int]) -> None:
    layer, real = make(), real_of(layout)[:, 0]
    x = torch.randn(ROWS, 23, 12, dtype=torch.float64)
    state, outputs = layer.init_state(ROWS, device=x.device, dtype=x.dtype), []
    with torch.no_grad():
        for columns, positions in in_steps(layout, sizes):
            y, state, _ = layer(x[:, columns], Context(positions), state)
            outputs.append(y)
        expected = layer(x, Context(place_of(layout))).y
    torch.testing.assert_close(torch.cat(outputs, 1) * real, expected * real, atol=1e-10, rtol=0)


def test_a_layer_without_a_head_is_one_whose_head_is_gated_off() -> None:
    layer, x, ctx = make(), torch.randn(ROWS, 23, 12, dtype=torch.float64), Context(place_of("packed"))
    with gated_heads(nn.ModuleDict({"attention": layer}), {"attention": torch.tensor([1.0, 0.0, 1.0])}):
        expected = layer(x, ctx).y
    layer.keep_heads([0, 2])
    torch.testing.assert_close(layer(x, ctx).y, expected, atol=1e-12, rtol=0)


def test_the_keys_and_values_of_each_step_are_matrices_of_their_own() -> None:
    model = mf.build("deltaproduct", **SIZES, value_dim=5)
    assert fused_row_parts(model)["body.0.attention.inner.kv_proj.weight"] == (12, 12, 15, 15)
