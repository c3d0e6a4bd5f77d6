"""Token mixing by weights of positions: tables of pairs, FNet and its variants, the MLP-Mixer's layer."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import FactorizedPairs, FourierMixer, LinearMixer, PairTable, PositionPairs, ToeplitzPairs, TokenMLP
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, TokenPositions
from manyformer.nn.masks import AllKeys, Causal
from manyformer.nn.token_mixing import dft_real, dft_real_reference
from perturbing import perturb

LONGEST, HEADS = 9, 2


def kinds() -> list[PositionPairs]:
    return [
        PairTable(LONGEST, heads=HEADS, std=1.0),
        FactorizedPairs(LONGEST, 3, heads=HEADS, std=1.0),
        ToeplitzPairs(LONGEST, heads=HEADS, std=1.0),
    ]


def dense(pairs: PositionPairs) -> torch.Tensor:
    """All numbers (h, l, s), by a loop."""
    actual = torch.empty(HEADS, LONGEST, LONGEST)
    for i in range(LONGEST):
        for j in range(LONGEST):
            if isinstance(pairs, PairTable):
                actual[:, i, j] = pairs.weight[:, i, j]
            elif isinstance(pairs, FactorizedPairs):
                actual[:, i, j] = (pairs.row[:, i] * pairs.column[:, j]).sum(-1)
            else:
                assert isinstance(pairs, ToeplitzPairs)
                actual[:, i, j] = pairs.weight[:, i - j + LONGEST - 1]
    return actual.detach()


def plain(start: int, length: int, rows: int = 3) -> TokenPositions:
    pos = torch.arange(start, start + length).expand(rows, -1)
    return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(start))


def scattered(*rows: list[int]) -> TokenPositions:
    pos = torch.tensor(rows)
    return TokenPositions(pos, torch.zeros_like(pos))


@pytest.mark.parametrize("kind", range(3))
def test_slices_and_lookups_say_the_same(kind: int) -> None:
    pairs = kinds()[kind]
    expected = dense(pairs)
    torch.testing.assert_close(pairs(plain(2, 4), plain(0, 6))[0], expected[:, 2:6, :6])
    at, of = scattered([0, 3, 8], [1, 1, 5]), scattered([2, 0], [7, 8])
    actual = pairs(at, of)
    assert actual.shape == (2, HEADS, 3, 2)
    for row in range(2):
        torch.testing.assert_close(actual[row], expected[:, at.position_ids[row][:, None], of.position_ids[row]])
    mixed = pairs(plain(4, 2, rows=2), of)
    for row in range(2):
        torch.testing.assert_close(mixed[row if len(mixed) > 1 else 0], expected[:, 4:6][..., of.position_ids[row]])


@pytest.mark.parametrize("kind", range(3))
def test_positions_that_do_not_exist_are_refused(kind: int) -> None:
    pairs = kinds()[kind]
    message = "position 9 does not exist: the model was built for max_length=9"
    with pytest.raises(ValueError, match=message):
        pairs(plain(0, 10), plain(0, 10))
    with pytest.raises(ValueError, match=message):
        pairs(plain(0, 2, rows=1), scattered([9]))


def test_they_start_as_large_as_asked_for() -> None:
    torch.manual_seed(0)
    for make in (
        lambda: PairTable(200, std=0.1),
        lambda: FactorizedPairs(200, 8, std=0.1),
        lambda: ToeplitzPairs(20000, std=0.1),
    ):
        pairs = make()
        actual = pairs.weight if isinstance(pairs, ToeplitzPairs) else pairs(plain(0, 200), plain(0, 200))
        assert float(actual.detach().std()) == pytest.approx(0.1, rel=0.1)
    assert not PairTable(4, std=1.0, trainable=False).weight.requires_grad
    with pytest.raises(ValueError, match=r"Table: max_length \(0\) must be at least 1"):
        PairTable(0, std=1.0)


def test_it_is_the_definition_for_each_document() -> None:
    layer = LinearMixer(3, 6).double()
    x = torch.randn(1, 7, 3, dtype=torch.float64)
    segments = torch.tensor([[0, 0, 0, 1, 1, PADDING_SEGMENT, PADDING_SEGMENT]])
    positions, _ = positions_of(torch.zeros(1, 7, dtype=torch.long), segments, None)
    y = layer(x, Context(positions)).y
    tokens, channels = layer.tokens.weight[0], layer.channels
    for start, length in ((0, 3), (3, 2)):
        for i, d in itertools.product(range(length), range(3)):
            pairs = itertools.product(range(length), range(3))
            expected = sum(tokens[i, j] * x[0, start + j, c] * channels[c, d] for j, c in pairs)
            torch.testing.assert_close(y[0, start + i, d], expected)


def fnet(mixing: str) -> Any:
    model: Any = mf.build("fnet", vocab=20, dim=16, depth=2, max_length=12, mixing=mixing)
    return model.eval()


@pytest.mark.parametrize(
    ("mixing", "sees_others"), [("fourier", True), ("linear", True), ("random", True), ("none", False)]
)
def test_tokens_are_mixed_or_not(mixing: str, sees_others: bool) -> None:
    model, tokens = fnet(mixing), torch.randint(3, 20, (1, 8))
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] - 2) % 17 + 3
    change = (model(tokens).logits - model(other).logits).abs().amax(-1)[0]
    assert (change[[0, 1, 2, 3, 4, 6, 7]] > 0).all() == sees_others
    assert change[5] > 0


def test_random_matrices_are_not_trained_and_linear_ones_are() -> None:
    weights = {
        mixing: sum(w.numel() for w in fnet(mixing).parameters() if w.requires_grad)
        for mixing in ("fourier", "linear", "random")
    }
    assert weights["random"] == weights["fourier"]
    assert weights["linear"] == weights["fourier"] + 2 * (12 * 12 + 16 * 16)


SEGMENTS = torch.tensor(
    [
        [0] * 11,
        [3] * 4 + [5] * 7,
        [-1] * 2 + [1] * 6 + [-1] * 3,
        [1] * 3 + [-1] * 2 + [2] * 6,
        [-1] * 11,
        list(range(11)),
    ]
)


def place_of(segments: Tensor | None, rows: int = 2, length: int = 11) -> TokenPositions:
    shape = (rows, length) if segments is None else tuple(segments.shape)
    return positions_of(torch.zeros(shape, dtype=torch.long), segments, None)[0]


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (2, 1), (5, 7), (8, 8), (11, 4), (12, 9)])
def test_all_three_ways_agree_with_torch(shape: tuple[int, int], norm: Any) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    place, grad_output = place_of(None, 3, shape[0]), torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.fft.fft2(x, dim=(1, 2), norm=norm).real
    for actual in (dft_real(x, place, norm), dft_real_reference(x, place, norm)):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
        ours, reference = (
            torch.autograd.grad((y * grad_output).sum(), x, retain_graph=True)[0] for y in (actual, expected)
        )
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


def test_the_definition() -> None:
    """One output, summed up by hand."""
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    k, m = 3, 2
    total = sum(float(x[0, j, n]) * math.cos(2 * math.pi * (k * j / 5 + m * n / 4)) for j in range(5) for n in range(4))
    assert float(dft_real(x, place_of(None, 1, 5))[0, k, m]) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_documents_are_transformed_by_themselves(norm: Any) -> None:
    place = place_of(SEGMENTS)
    x = torch.randn(6, 11, 6, dtype=torch.float64, requires_grad=True)
    # a document in two pieces, and places of which nothing is known in advance
    for given in (place, place._replace(layout=None)):
        actual = dft_real(x, given, norm)
        torch.testing.assert_close(actual, dft_real_reference(x, given, norm), atol=1e-10, rtol=0)
        for row in range(6):
            for number in set(SEGMENTS[row].tolist()):
                columns = SEGMENTS[row] == number
                alone = torch.fft.fft2(x[row, columns], norm=norm).real
                expected = torch.zeros_like(alone) if number == -1 else alone
                torch.testing.assert_close(actual[row, columns], expected, atol=1e-10, rtol=0)
    grad_output = torch.randn_like(x)
    one, other = (
        torch.autograd.grad((f(x, place, norm) * grad_output).sum(), x)[0] for f in (dft_real, dft_real_reference)
    )
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_its_gradient_has_a_gradient() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: dft_real(x, place_of(None, 2, 5)).sin(), x)


def test_energy_is_kept_by_cosines_and_sines_together() -> None:
    """Parseval: the real part of the transform and that of the turned one share the energy of the input."""
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    full = torch.fft.fft2(x, dim=(1, 2), norm="ortho")
    real = dft_real(x, place_of(None, 1, 9), "ortho")
    assert float(real.square().sum() + full.imag.square().sum()) == pytest.approx(float(x.square().sum()), abs=1e-10)


def test_half_precision_is_summed_in_single() -> None:
    x = torch.randn(2, 300, 64).bfloat16()
    place = place_of(None, 2, 300)
    expected = dft_real(x.float(), place)
    actual = dft_real(x, place)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.005 * expected.abs().max()


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"FourierMixer cannot apply the mask Causal\(\): each output is a sum over all"
    ):
        FourierMixer(Causal())
    with pytest.raises(ValueError, match="cannot continue from a state: a later token changes all earlier outputs"):
        FourierMixer(AllKeys()).init_state(1, device=torch.device("cpu"), dtype=torch.float32)


def test_it_is_a_layer_with_nothing_to_learn() -> None:
    x, place = torch.randn(2, 11, 4), place_of(None)
    layer = FourierMixer(norm="ortho")
    assert not list(layer.parameters())
    assert torch.equal(layer(x, Context(place)).y, dft_real(x, place, "ortho"))


def test_a_layer_by_its_formula() -> None:
    """Liu et al. 2021, section 2: Z1 * (W norm(Z2) + b) of GELU(norm(X) U), projected and added."""
    model: Any = perturb(mf.build("gmlp-vit", classes=3, height=8, width=12, channels=2, patch=4, dim=8, depth=1), 0.3)
    model = model.double().eval()
    images = torch.randint(0, 256, (2, 8, 12, 2), dtype=torch.uint8)
    w = dict(model.named_parameters())
    patches = images.double().view(2, 2, 4, 3, 4, 2).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 32)
    scaled = (patches / 255 - 0.5) / 0.5
    x = scaled @ w["embed.project.weight"].T + w["embed.project.bias"]
    part = "body.0.mixer.inner."
    normed = F.layer_norm(x, (8,), w["body.0.mixer.pre_norm.weight"], w["body.0.mixer.pre_norm.bias"], 1e-6)
    z1, z2 = F.gelu(normed @ w[f"{part}up.weight"].T + w[f"{part}up.bias"]).chunk(2, -1)
    z2 = F.layer_norm(z2, (24,), w[f"{part}norm.weight"], w[f"{part}norm.bias"], 1e-5)
    gate = torch.einsum("ij,bjc->bic", w[f"{part}weights.weight"][0], z2) + w[f"{part}bias"][:, None]
    x = x + (z1 * gate) @ w[f"{part}down.weight"].T + w[f"{part}down.bias"]
    x = F.layer_norm(x, (8,), w["body.norm.inner.weight"], w["body.norm.inner.bias"], 1e-6).mean(1)
    expected = x @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(model(images).logits, expected, atol=1e-8, rtol=0)


def test_every_channel_goes_through_the_same_layer() -> None:
    layer, x = TokenMLP(7, 5), torch.randn(3, 7, 4)
    place, _ = positions_of(torch.zeros(3, 7, dtype=torch.long), None, None)
    y = layer(x, Context(place)).y
    for channel in range(4):
        alone = layer.down(torch.nn.functional.gelu(layer.up(x[..., channel])))
        torch.testing.assert_close(y[..., channel], alone)


def test_other_numbers_of_tokens_padding_and_states_are_refused() -> None:
    layer, tokens = TokenMLP(7, 5), torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="mixes exactly 7 tokens, not 6"):
        layer(torch.randn(1, 6, 4), Context(positions_of(tokens, None, None)[0]))
    tokens = torch.zeros(1, 7, dtype=torch.long)
    padded, _ = positions_of(tokens, torch.tensor([[0] * 5 + [-1] * 2]), None)
    with pytest.raises(ValueError, match="it allows neither padding nor packing"):
        layer(torch.randn(1, 7, 4), Context(padded))
    with pytest.raises(ValueError, match="cannot continue from a state"):
        layer.init_state(1, device=torch.device("cpu"), dtype=torch.float32)
