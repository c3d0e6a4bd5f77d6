"""RoutingKernel: centroids that follow the keys, and attention among the members of a cluster."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from layouts import LAYOUTS, apart, differentiated, documents_of, in_steps, place_of, real_of
from manyformer.analysis.contracts import check
from manyformer.analysis.own_models import build_tiny
from manyformer.models import Model
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, KernelCall, RoutingKernel
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.clustered import centroids
from manyformer.nn.clustered.centroids import CentroidSums, KMeansCentroids
from manyformer.nn.clustered.routing_kernel import BalancedMembership, ClusterMembership, NearestMembership
from manyformer.nn.core import Context
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.positions import NoPosition, RotaryPosition
from manyformer.nn.runtime.training_hooks import run_post_step_updates
from manyformer.recipes import build

MEMBERSHIPS = [BalancedMembership(), BalancedMembership(5), NearestMembership(3), NearestMembership(50)]


def kernel(membership: ClusterMembership, clusters: int = 4) -> RoutingKernel:
    return RoutingKernel(KMeansCentroids(2, clusters, 6), membership).eval()


def drawn(dtype: torch.dtype = torch.float64, length: int = 23) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 2, length, 6, dtype=dtype, requires_grad=True) for _ in range(2))  # type: ignore[return-value]


def watched(route: RoutingKernel, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the written-out form, and its weights."""
    seen: dict[str, Tensor] = {}
    place = place_of("plain")
    out = route(
        KernelCall(k, k, v, place, place, NoPosition(), None, lambda module, name, value: seen.update({name: value}))
    )
    return out.y, seen["weights"]


@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"])
def test_the_fast_way_is_the_definition(membership: ClusterMembership, dtype: torch.dtype, tolerance: float) -> None:
    route, (k, v), place = kernel(membership), drawn(dtype), place_of("plain")
    fast = route(KernelCall(k, k, v, place, place, NoPosition())).y
    slow, weights = watched(route, k, v)
    grad_output = torch.randn_like(fast)
    assert apart(differentiated(fast, grad_output, (k, v)), differentiated(slow, grad_output, (k, v))) < tolerance
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("membership", [BalancedMembership(), NearestMembership(23)], ids=repr)
def test_one_cluster_is_full_attention_to_shared_keys(membership: ClusterMembership) -> None:
    route, (k, v), place = kernel(membership, clusters=1), drawn(), place_of("plain")
    actual = route(KernelCall(k, k, v, place, place, NoPosition())).y
    keys = F.layer_norm(k, (6,))
    earlier = torch.ones(23, 23, dtype=torch.bool).tril(-1)
    earlier[0, 0] = True
    expected = ops.fused_attention(keys, keys, v, earlier[None, None], causal=False, scale=1 / math.sqrt(6))
    grad_output = torch.randn_like(actual)
    assert apart(differentiated(actual, grad_output, (k, v)), differentiated(expected, grad_output, (k, v))) < 1e-10


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("membership", MEMBERSHIPS[:3], ids=repr)
def test_documents_are_clustered_by_themselves(membership: ClusterMembership, layout: str) -> None:
    route, (k, v), place = kernel(membership), drawn(), place_of(layout)
    y = route(KernelCall(k, k, v, place, place, NoPosition())).y
    assert y.isfinite().all()
    for row, columns in documents_of(layout):
        alone = positions_of(torch.zeros(1, len(columns), dtype=torch.long), None, None)[0]
        one_k, one_v = (x[row : row + 1, :, columns] for x in (k, v))
        expected = route(KernelCall(one_k, one_k, one_v, alone, alone, NoPosition())).y
        torch.testing.assert_close(y[row : row + 1, :, columns], expected)


@pytest.mark.parametrize("layout", ["plain", "left padding", "packed"])
@pytest.mark.parametrize("sizes", [[1] * 23, [9, 1, 13]], ids=["single", "chunks"])
def test_going_on_gives_what_one_pass_gives(layout: str, sizes: list[int]) -> None:
    attention = Attention(12, 2, kernel(NearestMembership(3)).double()).double().eval()
    x = torch.randn(2, 23, 12, dtype=torch.float64)
    expected = attention(x, Context(place_of(layout))).y
    state, actual = attention.init_state(2, device=x.device, dtype=x.dtype), []
    for part, place in in_steps(layout, sizes):
        y, state, _ = attention(x[:, part], Context(place), state)
        actual.append(y)
    real = real_of(layout)[:, 0]
    torch.testing.assert_close(torch.cat(actual, 1) * real, expected * real)


def test_a_token_sees_members_of_its_own_cluster_alone() -> None:
    route, (k, v) = kernel(NearestMembership(3)), drawn()
    _, weights = watched(route, k, v)
    scores = F.layer_norm(k, (6,)) @ route.centroids.mean.to(k.dtype).mT
    label = scores.argmax(-1)
    assert ((weights > 0) <= (label[..., None] == label[..., None, :])).all()


def test_states_of_balanced_clusters_rotary_positions_and_empty_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"BalancedMembership\(size=None\) is not causal"):
        kernel(BalancedMembership()).init_state(1, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="does not support"):
        Attention(12, 2, kernel(NearestMembership(3)), position=RotaryPosition(6))
    with pytest.raises(ValueError, match="at least 1 token"):
        NearestMembership(0)
    with pytest.raises(ValueError, match=r"decay \(1.0\)"):
        KMeansCentroids(1, 2, 3, decay=1.0)
    for words, what in (({"local_heads": 4}, "local"), ({"routing_layers": 9}, "rout"), ({"dim": 30}, "dim")):
        with pytest.raises(ValueError, match=what):
            build("routing-transformer", **{"dim": 32, "heads": 4, "depth": 2, "local_heads": 2} | words)


def blobs(count: int) -> tuple[Tensor, Tensor]:
    """Keys around four directions, and which."""
    centers = F.normalize(torch.eye(4, 8) * 3 + 0.1, dim=-1)
    label = torch.randint(4, (1, 1, count))
    return F.normalize(centers[label] + 0.15 * torch.randn(1, 1, count, 8), dim=-1), label


def test_centroids_find_clusters_and_follow_them() -> None:
    means = KMeansCentroids(1, 4, 8, decay=0.9).train()
    for step in range(60):
        means(blobs(64)[0], None)
        means.after_step(step + 1)
    x, label = blobs(400)
    actual = means.eval()(x, None).argmax(-1)
    purity = sum(
        int(label[actual == cluster].bincount(minlength=4).max()) for cluster in range(4) if (actual == cluster).any()
    )
    assert purity / 400 >= 0.98
    torch.testing.assert_close(means.mean.norm(dim=-1), torch.ones(1, 4))


def test_the_first_batch_is_read_before_centroids_start_from_it() -> None:
    means = KMeansCentroids(1, 4, 8).train()
    initial, x = means.mean.clone(), blobs(64)[0]
    torch.testing.assert_close(means(x, None), x @ initial.mT)
    assert not means.started
    means.after_step(1)
    assert means.started
    assert not torch.equal(means.mean, initial)


def test_a_start_from_the_batch_that_it_routes_is_seen_by_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("routing-transformer-strict", {}, 0)

    def start_at_once(self: KMeansCentroids, x: Tensor, valid: Tensor | None, count: int | None) -> None:
        if not self.started:
            self._init_from_keys(x.transpose(0, 1).flatten(1, 2))

    monkeypatch.setattr(KMeansCentroids, "_accumulate", start_at_once)
    row = check(model, only=["causal-training"], length=64)["causal-training"]
    assert row.verdict == "failed"
    assert "the future leaks" in row.sentence


def test_an_average_moves_as_the_formula_says() -> None:
    means = KMeansCentroids(2, 3, 4, decay=0.75).train()
    first, second = (F.normalize(torch.randn(2, 2, 9, 4), dim=-1) for _ in range(2))
    means(first, None)
    means.after_step(1)
    sums, mean = means.sums.clone(), means.mean.clone()
    real = torch.rand(2, 9) < 0.6
    means(second, real)
    torch.testing.assert_close(means.mean, mean)
    means.after_step(2)
    for head in range(2):
        keys = second[:, head][real]
        label = (keys @ mean[head].T).argmax(-1)
        for cluster in range(3):
            expected = 0.75 * sums[head, cluster] + 0.25 * keys[label == cluster].sum(0) / len(keys)
            torch.testing.assert_close(means.sums[head, cluster], expected)
            torch.testing.assert_close(means.mean[head, cluster], F.normalize(expected, dim=0))


def test_centroids_stay_in_evaluation_and_without_gradient() -> None:
    model = build("routing-transformer", vocab=11, dim=16, depth=1, heads=2, local_heads=1, clusters=3, window=4)
    before = {name: value.clone() for name, value in model.state_dict().items() if "centroids" in name}
    tokens = torch.randint(11, (2, 19))
    model.eval()
    loss = model(tokens).loss
    run_post_step_updates(model, 1)
    assert loss == 0.0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    model.train()
    out = model(tokens)
    assert 0 < float(out.loss.detach()) < 4e-4
    run_post_step_updates(model, 1)
    assert any(not torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any("centroids" in name for name, _ in model.named_parameters())


def test_a_model_learns_the_same_again_and_is_saved_with_its_centroids(tmp_path: Path) -> None:
    def trained() -> Model:
        torch.manual_seed(3)
        model = build(
            "routing-transformer-strict",
            vocab=11,
            dim=16,
            depth=2,
            heads=2,
            local_heads=1,
            routing_layers=1,
            clusters=3,
        )
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.randint(11, (2, 12))
            actual = model.train().loss(CausalLMBatch(tokens, tokens))
            (actual.total / actual.targets + actual.extra).backward()
            optimiser.step()
            optimiser.zero_grad()
            run_post_step_updates(model, step + 1)
        return model

    one, two = trained(), trained()
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    one.save(tmp_path / "model")
    tokens = torch.randint(11, (1, 9))
    torch.testing.assert_close(mf.load(tmp_path / "model")(tokens).logits, one.eval()(tokens).logits)


def test_processes_average_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of a batch, each with its own copy, whose sums are added as between processes."""
    halves, full = [KMeansCentroids(1, 3, 4).train() for _ in range(2)], KMeansCentroids(1, 3, 4).train()
    keys = F.normalize(torch.randn(2, 1, 7, 4), dim=-1)
    for each in (*halves, full):
        each.load_state_dict(full.state_dict())
        each.started.fill_(1)
    for half, part in zip(halves, keys.split(1)):
        half(part, None)
    full(keys, None)
    full.after_step(1)
    pending = [half._pending for half in halves]
    assert all(isinstance(part, CentroidSums) for part in pending)
    sums = iter([pending[0].sums + pending[1].sums, pending[0].total + pending[1].total] * 2)  # type: ignore[union-attr]
    monkeypatch.setattr(centroids, "_sum_over_processes", lambda _: next(sums))
    for half in halves:
        half.after_step(1)
        torch.testing.assert_close(half.state_dict(), full.state_dict())


def test_routing_finds_more_of_full_attention_than_chance() -> None:
    """On keys in clusters, at least twice the weight that random clusters of the same sizes have."""
    x, _ = blobs(64)
    means = KMeansCentroids(1, 4, 8).train()
    means(x, None)
    means.after_step(1)
    label = means.eval()(x, None).argmax(-1)[0, 0]
    full = ops.masked_softmax(8 * x @ x.mT, ~torch.eye(64, dtype=torch.bool)[None, None])[0, 0]
    random = label[torch.randperm(64)]
    actual, chance = (float((full * (by[:, None] == by)).sum()) for by in (label, random))
    assert actual > 2 * chance
