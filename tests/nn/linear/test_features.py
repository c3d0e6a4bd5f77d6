"""Feature maps: what kernels they stand for, how near, and that what is drawn can be drawn again."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn import KernelCall, LinearKernel
from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.linear import (
    ArcCosineFeatures,
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    FavorPlusFeatures,
    FeatureMap,
    GeneralizedFavorFeatures,
    HedgehogFeatures,
    HyperbolicFavorFeatures,
    RandomFourierFeatures,
    T2RFeatures,
    TaylorFeatures,
    TrigonometricFavorFeatures,
)
from manyformer.nn.linear.feature_map import independent_directions, orthogonal_directions
from manyformer.nn.positions import NoPosition
from manyformer.nn.runtime.training_hooks import run_post_step_updates

KEY = 16


def place(length: int) -> TokenPositions:
    return TokenPositions(torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long), ContiguousLayout())


def kernel_of(features: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """The kernel of every pair that the features stand for, their scale included."""
    actual = [features(x, place(x.shape[2])) for x in (q, k)]
    a, c = (f.y if f.log_scale is None else f.y * f.log_scale.exp()[..., None] for f in actual)
    return a @ c.mT


def drawn(scale: float, length: int = 24) -> tuple[Tensor, Tensor]:
    q, k = (scale * torch.randn(1, 1, length, KEY, dtype=torch.float64) for _ in range(2))
    return q, k


def softmax_kernel(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(KEY)).exp()


def gaussian(q: Tensor, k: Tensor) -> Tensor:
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return (-(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2).exp()


def arc_cosine(q: Tensor, k: Tensor) -> Tensor:
    """Cho and Saul 2009, equation 6 with n = 1, over two: the mean of relu(w.x) relu(w.y) for normal w."""
    sizes = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
    angle = (q @ k.mT / sizes).clamp(-1, 1).acos()
    return sizes * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)


RANDOM: dict[str, tuple[Callable[[int], FeatureMap], Callable[[Tensor, Tensor], Tensor]]] = {
    "FAVOR+": (lambda m: FavorPlusFeatures(KEY, m, floor=0.0), softmax_kernel),
    "FAVOR+ independent": (lambda m: FavorPlusFeatures(KEY, m, directions="independent", floor=0.0), softmax_kernel),
    "hyperbolic": (lambda m: HyperbolicFavorFeatures(KEY, 2 * m, floor=0.0), softmax_kernel),
    "trigonometric": (lambda m: TrigonometricFavorFeatures(KEY, 2 * m), softmax_kernel),
    "Fourier": (lambda m: RandomFourierFeatures(KEY, 2 * m, heads=1), gaussian),
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_error_falls_as_one_over_the_root_of_the_number(name: str) -> None:
    """Of attention's output, at a size of queries and keys at which the variance is finite for practice."""
    make, exact = RANDOM[name]
    q, k = drawn(0.3)
    v = torch.randn(1, 1, q.shape[2], 8, dtype=torch.float64)
    weights = exact(q, k)
    expected = weights / weights.sum(-1, keepdim=True) @ v
    counts, errors = [32, 128, 512, 2048], []
    for count in counts:
        squares = []
        for _ in range(40):
            actual = LinearKernel(make(count).double(), floor=1e-12)(
                KernelCall(q, k, v, place(24), place(24), NoPosition())
            ).y
            squares.append(float((actual - expected).square().mean().detach()))
        errors.append(math.sqrt(sum(squares) / len(squares)))
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert -0.6 <= slope <= -0.4, (slope, errors)


@pytest.mark.parametrize("name", RANDOM)
def test_the_kernel_is_estimated_without_bias(name: str) -> None:
    """The mean over many draws lies within four standard errors of the kernel, for every pair but chance ones."""
    make, exact = RANDOM[name]
    q, k = drawn(0.4, 6)
    draws = torch.stack([kernel_of(make(64).double(), q, k).detach() for _ in range(400)])
    far = (draws.mean(0) - exact(q, k)).abs() / (draws.std(0) / math.sqrt(len(draws)))
    assert float(far.max()) < 4.5
    # a kernel that is a tenth off would have been seen
    assert float((0.1 * exact(q, k) / (draws.std(0) / math.sqrt(len(draws)))).median()) > 4.5


def test_the_rectified_kernel_is_the_arc_cosine() -> None:
    q, k = drawn(1.0, 5)
    scaled = [x * KEY**-0.25 for x in (q, k)]
    many = torch.stack([kernel_of(GeneralizedFavorFeatures(KEY, 1024, floor=0.0), q, k) / 1024 for _ in range(100)])
    far = (many.mean(0) - arc_cosine(*scaled)).abs() / (many.std(0) / 10)
    assert float(far.max()) < 4.5
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    many = torch.stack([kernel_of(ArcCosineFeatures(KEY, 1024, heads=1).double(), q, k).detach() for _ in range(100)])
    far = (many.mean(0) - arc_cosine(*unit)).abs() / (many.std(0) / 10)
    assert float(far.max()) < 4.5


def test_orthogonal_directions_vary_less() -> None:
    """Theorem 2 of Choromanski et al. 2021."""
    q, k = drawn(0.3)
    error = {}
    for directions in ("orthogonal", "independent"):
        features_of_draws = [FavorPlusFeatures(KEY, 32, directions=directions, floor=0.0) for _ in range(300)]  # type: ignore[arg-type]
        actual = torch.stack([kernel_of(one.double(), q, k) for one in features_of_draws])
        error[directions] = float((actual - softmax_kernel(q, k)).square().mean())
    assert error["orthogonal"] < 0.95 * error["independent"]


def test_the_variance_of_independent_positive_features_is_that_of_the_paper() -> None:
    """Lemma 2: exp(|x + y|^2) SM^2 (1 - exp(-|x + y|^2)) for one feature."""
    q, k = drawn(0.3, 4)
    count = 200_000
    features = FavorPlusFeatures(KEY, count, directions="independent", floor=0.0).double()
    left, right = (features(x, place(4)) for x in (q, k))
    assert left.log_scale is not None
    assert right.log_scale is not None
    scale = (left.log_scale[..., :, None] + right.log_scale[..., None, :]).exp() * count
    each = left.y[..., :, None, :] * right.y[..., None, :, :] * scale[..., None]
    both = (q[..., :, None, :] + k[..., None, :, :]).square().sum(-1) / math.sqrt(KEY)
    expected = both.exp() * softmax_kernel(q, k).square() * (1 - (-both).exp())
    torch.testing.assert_close(each.var(-1), expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("features", [HyperbolicFavorFeatures, TrigonometricFavorFeatures])
def test_the_variance_of_pairs_of_features_is_that_of_the_paper(features: Any) -> None:
    """Lemma 2, for one direction: half of (1 - exp(-|x + y|^2)) as much, and the one of the trigonometric pair."""
    q, k = drawn(0.3, 4)
    count = 100_000
    floor = {"floor": 0.0} if features is HyperbolicFavorFeatures else {}
    feature_map = features(KEY, 2 * count, directions="independent", **floor).double()
    left, right = (feature_map(x, place(4)) for x in (q, k))
    scale = (left.log_scale[..., :, None] + right.log_scale[..., None, :]).exp() * count
    each = left.y[..., :, None, :] * right.y[..., None, :, :] * scale[..., None]
    each = each[..., :count] + each[..., count:]
    both, apart = (
        (q[..., :, None, :] + sign * k[..., None, :, :]).square().sum(-1) / math.sqrt(KEY) for sign in (1, -1)
    )
    exact = softmax_kernel(q, k)
    positive = both.exp() * exact.square() * (1 - (-both).exp())
    expected = {
        HyperbolicFavorFeatures: 0.5 * (1 - (-both).exp()) * positive,
        TrigonometricFavorFeatures: 0.5 * both.exp() * exact**-2 * (1 - (-apart).exp()).square(),
    }[features]
    torch.testing.assert_close(each.mean(-1), exact, rtol=0.05, atol=0)
    torch.testing.assert_close(each.var(-1), expected, rtol=0.1, atol=0)


def test_directions_of_one_length_estimate_the_regularized_kernel() -> None:
    """In two dimensions the mean of exp(w.z) over |w| = sqrt(2) is the Bessel function I_0 of sqrt(2) |z|."""
    x, y = (0.8 * torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(2))
    feature_map = FavorPlusFeatures(2, 100_000, directions="regularized", floor=0.0).double()
    assert torch.allclose(feature_map.matrix.norm(dim=-1), torch.tensor(2.0, dtype=torch.float64).sqrt())
    x, y = x * 2**0.25, y * 2**0.25
    both = (x[..., :, None, :] + y[..., None, :, :]).norm(dim=-1) / 2**0.25
    norms = (x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]) / 2**0.5
    expected = (-norms / 2).exp() * torch.special.i0(math.sqrt(2) * both)
    torch.testing.assert_close(kernel_of(feature_map, x, y), expected, rtol=0.02, atol=0)
    assert (expected <= (x @ y.mT / 2**0.5).exp() + 1e-12).all()


@pytest.mark.parametrize("count", [5, 16, 40])
def test_directions(count: int) -> None:
    w = orthogonal_directions(count, KEY, torch.Generator().manual_seed(1))
    assert w.shape == (count, KEY)
    unit = w / w.norm(dim=-1, keepdim=True)
    for begin in range(0, count, KEY):
        block = unit[begin : begin + KEY]
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)), atol=1e-5, rtol=0)
    # lengths are those of normal vectors, drawn apart from the directions
    lengths = torch.stack(
        [orthogonal_directions(64, KEY, torch.Generator().manual_seed(s)).square().sum(-1) for s in range(50)]
    )
    assert abs(float(lengths.mean()) - KEY) < 0.5
    assert abs(float(lengths.var()) - 2 * KEY) < 4
    assert independent_directions(7, KEY, torch.Generator()).shape == (7, KEY)


def test_closed_forms() -> None:
    q, k = drawn(1.0, 5)
    s = q @ k.mT / math.sqrt(KEY)
    torch.testing.assert_close(kernel_of(TaylorFeatures(), q, k), 1 + s + s**2 / 2)
    elu = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
    torch.testing.assert_close(kernel_of(EluPlusOneFeatures(), q, k), elu[0] @ elu[1].mT)
    i = torch.arange(5, dtype=torch.float64)
    falling = (math.pi / 2 * (i[:, None] - i) / 32).cos()
    torch.testing.assert_close(kernel_of(CosineReweightingFeatures(32), q, k), q.relu() @ k.relu().mT * falling)
    x = torch.tensor([1.0, -2.0, 3.0])
    actual = DPFPFeatures()(x[None, None, None], place(1)).y[0, 0, 0]
    # relu(x), relu(-x) = 1 0 3 0 2 0, each times the one before it
    assert actual.tolist() == [0, 0, 0, 0, 0, 0]
    assert DPFPFeatures(reach=2)(x[None, None, None], place(1)).y[0, 0, 0].tolist() == [0] * 6 + [2, 0, 3, 0, 6, 0]


def test_learned_maps_are_those_of_each_head() -> None:
    x = torch.randn(2, 4, 5, KEY)
    t2r, hedgehog = T2RFeatures(KEY, 7, heads=2), HedgehogFeatures(KEY, heads=2)
    # at first the identity
    torch.testing.assert_close(hedgehog(x, place(5)).y, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    for parameter in (*t2r.parameters(), *hedgehog.parameters()):
        torch.nn.init.normal_(parameter)
    relu, exponential = t2r(x, place(5)).y, hedgehog(x, place(5)).y
    for head in range(4):
        group, inputs = head // 2, x[:, head]
        expected = torch.nn.functional.linear(inputs, t2r.weight[group], t2r.bias[group]).relu()
        torch.testing.assert_close(relu[:, head], expected)
        scores = torch.nn.functional.linear(inputs, hedgehog.weight[group])
        torch.testing.assert_close(exponential[:, head, :, KEY:], scores.neg().softmax(-1))
        torch.testing.assert_close(exponential[:, head, :, :KEY], scores.softmax(-1))


@pytest.mark.parametrize(
    "make",
    [lambda: FavorPlusFeatures(3, 5, floor=0.0), lambda: RandomFourierFeatures(3, 8, heads=2), EluPlusOneFeatures],
)
def test_gradients_written_by_hand_are_those_of_finite_differences(make: Any) -> None:
    features = make().double()
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def whole(x: Tensor) -> Tensor:
        y, log = features(x, place(4))
        # what the two parts share is a constant to gradients, and cancels in the product
        return y if log is None else y * log.exp()[..., None]

    assert torch.autograd.gradcheck(whole, (x,))


def test_a_floor_is_a_constant_to_gradients() -> None:
    """Relative to the largest feature: exp(w.x - c) + floor with the largest c taken as a number."""
    features = FavorPlusFeatures(3, 5, floor=0.1).double()
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    y, log = features(x, place(4))
    assert log is not None
    scaled = x * 3**-0.25
    products = scaled @ features.matrix[0].T
    top = products.detach().amax(-1, keepdim=True)
    expected = (products - top).exp() + 0.1, (top - scaled.square().sum(-1, keepdim=True) / 2)[..., 0] - math.log(5) / 2
    grad_outputs = torch.randn_like(y), torch.randn_like(log)
    torch.testing.assert_close((y, log), expected)
    torch.testing.assert_close(*(torch.autograd.grad(pair, x, grad_outputs)[0] for pair in ((y, log), expected)))


class TestRedrawing:
    """Directions change with the training step alone."""

    def test_when(self) -> None:
        features = FavorPlusFeatures(4, 8, redraw=3)
        seen = []
        for step in range(1, 8):
            run_post_step_updates(features, step)
            seen.append(features.matrix.clone())
        changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
        assert changed == [False, True, False, False, True, False]

    def test_never(self) -> None:
        features = FavorPlusFeatures(4, 8)
        before = features.matrix.clone()
        run_post_step_updates(features, 1000)
        assert torch.equal(features.matrix, before)

    def test_a_run_that_is_stopped_draws_the_same_again(self) -> None:
        one = RandomFourierFeatures(4, 8, heads=2, redraw=1)
        run_post_step_updates(one, 1)
        saved = {name: value.clone() for name, value in one.state_dict().items()}
        run_post_step_updates(one, 2)
        torch.manual_seed(99)
        other = RandomFourierFeatures(4, 8, heads=2, redraw=1)
        assert not torch.equal(other.matrix, one.matrix)
        other.load_state_dict(saved)
        # whatever the process has drawn meanwhile
        torch.randn(5)
        run_post_step_updates(other, 2)
        assert torch.equal(other.matrix, one.matrix)
        assert torch.equal(other.seed, one.seed)

    def test_it_leaves_the_random_numbers_of_others_alone(self) -> None:
        features = FavorPlusFeatures(4, 8, redraw=1)
        before = torch.get_rng_state()
        run_post_step_updates(features, 1)
        assert torch.equal(torch.get_rng_state(), before)

    def test_heads_layers_and_draws_differ(self) -> None:
        model: Any = mf.build("rfa", vocab=11, dim=8, depth=2, heads=2, features=8)
        matrices = [m.matrix for m in model.modules() if isinstance(m, RandomFourierFeatures)]
        heads = [head.clone() for matrix in matrices for head in matrix]
        run_post_step_updates(model, 1)
        heads += [head for matrix in matrices for head in matrix]
        assert len({str(head.tolist()) for head in heads}) == 8

    def test_it_is_saved_with_the_model(self, tmp_path: Any) -> None:
        model: Any = mf.build("performer", vocab=11, dim=8, depth=1, heads=2, features=6, redraw=1).eval()
        run_post_step_updates(model, 7)
        model.save(tmp_path / "model")
        again: Any = mf.load(tmp_path / "model")
        tokens = torch.randint(0, 11, (2, 9))
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        for one in (model, again):
            run_post_step_updates(one, 8)
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_signed_features_have_no_floor() -> None:
    with pytest.raises(TypeError, match="floor"):
        TrigonometricFavorFeatures(KEY, 8, floor=1e-3)  # type: ignore[call-arg]
