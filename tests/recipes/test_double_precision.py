"""A model in float64 has constants in float64: it computes the same, whether it was built so or became one later."""

import copy
import math

import numpy as np
import pytest
import torch

from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.models import Model
from manyformer.nn.core import contiguous_positions
from manyformer.nn.linear.decay_gates import FixedDecay
from manyformer.nn.positions import AlibiPosition, SinusoidalPosition
from manyformer.nn.positions.step_signal import SinusoidalStepSignal
from manyformer.nn.positions.transformer_xl import TransformerXLPosition
from manyformer.recipes import recipe_names

LENGTH = 24


def logits(model: Model) -> torch.Tensor:
    """The outputs for random inputs, the same for every model of a recipe."""
    subject = OwnSubject(model.eval())
    length = LENGTH if subject.max_length is None else min(LENGTH, subject.max_length)
    trial = ContractTrial(subject, torch.Generator().manual_seed(3), length, length, None, 0.0)
    inputs = trial.draw(2, trial.round_length(length))
    torch.manual_seed(5)
    with torch.no_grad():
        return subject(inputs).logits


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", sorted(recipe_names()))
def test_a_model_that_becomes_one_of_float64_is_as_one_that_was_built_so(recipe: str) -> None:
    converted = build_tiny(recipe, {}, 0).double()
    torch.set_default_dtype(torch.float64)
    try:
        native = build_tiny(recipe, {}, 0)
        native.load_state_dict(copy.deepcopy(converted.state_dict()))
        expected = logits(native)
    finally:
        torch.set_default_dtype(torch.float32)
    actual = logits(converted)
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def decays(recipe: str, heads: int) -> list[torch.Tensor]:
    model = build_tiny(recipe, {"heads": heads, "dim": 4 * heads}, 0).double()
    gate = torch.zeros(1, heads, 1, 0, dtype=torch.float64)
    return [module(gate).flatten() for module in model.modules() if isinstance(module, FixedDecay)]


def test_decays_of_retnet_are_exact_in_float64() -> None:
    expected = [np.log1p(-(np.float64(2) ** (-5 - head))) for head in range(3)]
    for layer in decays("retnet", 3):
        np.testing.assert_allclose(layer.numpy(), expected, rtol=1e-15)


def test_decays_of_lightning_are_exact_in_float64() -> None:
    layers = decays("lightning", 3)
    assert len(layers) == 2
    for number, layer in enumerate(layers):
        factor = 1 - number / (len(layers) - 1 + 1e-5) + 1e-5
        expected = [-(2.0 ** (-8 / 3 * head)) * factor for head in (1, 2, 3)]
        np.testing.assert_allclose(layer.numpy(), expected, rtol=1e-15)


def test_slopes_of_alibi_are_exact_in_float64() -> None:
    position = AlibiPosition(12).double()
    expected = [2.0 ** (-8 * n / 8) for n in range(1, 9)] + [2.0 ** (-8 * n / 16) for n in (1, 3, 5, 7)]
    np.testing.assert_allclose(position.slopes.numpy(), expected, rtol=1e-15)
    bias = position.distance_terms(7, 0).bias
    assert bias is not None
    assert bias.dtype == torch.float64
    np.testing.assert_allclose(bias[:, 0].numpy(), [-7 * slope for slope in expected], rtol=1e-15)
    assert AlibiPosition(12).slopes.dtype == AlibiPosition(12).bfloat16().slopes.dtype == torch.float32


def sines(position: int, dim: int) -> list[float]:
    angles = [position * math.exp(-math.log(10_000) * pair / (dim // 2)) for pair in range(dim // 2)]
    return [value for angle in angles for value in (math.sin(angle), math.cos(angle))]


@pytest.mark.parametrize("last", [5, 700])
def test_sinusoids_are_exact_in_float64(last: int) -> None:
    position = SinusoidalPosition(8).double()
    positions = contiguous_positions(1, 0, last + 1, torch.device("cpu"))
    added = position.embed(torch.zeros(1, last + 1, 8, dtype=torch.float64), positions)
    np.testing.assert_allclose(added[0, last].numpy(), sines(last, 8), atol=1e-12)
    np.testing.assert_allclose(SinusoidalStepSignal(8).double()(2).numpy(), sines(3, 8), atol=1e-15)
    # a model of low precision keeps the table of float32
    assert SinusoidalPosition(8).rows(torch.tensor([last])).dtype == torch.float32


def test_relative_sinusoids_are_exact_in_float64() -> None:
    position = TransformerXLPosition(8, 2).double()
    with torch.no_grad():
        position.r_proj.weight.copy_(torch.eye(8))
        vectors = position.distance_vectors(9, 0)
    expected = np.array(sines(9, 8))
    np.testing.assert_allclose(vectors[:, 0].flatten().numpy(), [*expected[::2], *expected[1::2]], atol=1e-15)
