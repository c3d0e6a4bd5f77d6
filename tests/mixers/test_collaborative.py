"""Heads that share dimensions: what their scores are, and trained heads made to share."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.attention import Attention
from manyformer.core import PADDING_SEGMENT, Context, ContiguousLayout, MemorySequence, TokenPositions
from manyformer.errors import UserError
from manyformer.head_sharing import factorize
from manyformer.masks import Causal
from manyformer.mixers.collaborative_attention import CollaborativeAttention
from manyformer.sources import CrossAttentionSource
from perturbing import perturb

DIM, HEADS, SHARED, LENGTH = 12, 3, 8, 7
WORDS: dict[str, Any] = {"vocab": 19, "dim": DIM, "depth": 2, "heads": HEADS, "ff_dim": 16, "max_length": 32}


def place(length: int) -> TokenPositions:
    return TokenPositions(torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long), ContiguousLayout())


def shaken(module: Any) -> Any:
    return perturb(module, 0.3)


def one_by_one(layer: CollaborativeAttention, x: Tensor, y: Tensor, *, causal: bool) -> Tensor:
    """The formulas of section 3 for every pair of tokens and every head, as they stand there."""
    v = layer.v_proj(y).view(len(y), HEADS, -1)
    rows = []
    for i, query in enumerate(x):
        heads = []
        for h in range(HEADS):
            seen = range(i + 1 if causal else len(y))
            middle = layer.q_proj.weight.T @ layer.mixing[h].diag() @ layer.k_proj.weight
            scores = [query @ middle @ y[j] + layer.key_bias.weight[h] @ y[j] for j in seen]
            weights = torch.stack(scores).div((layer.shared / HEADS) ** 0.5).softmax(0)
            heads.append(sum(w * v[j, h] for w, j in zip(weights, seen)))
        rows.append(torch.cat(heads))  # type: ignore[arg-type]
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize("causal", [True, False])
def test_the_definition(causal: bool) -> None:
    layer = shaken(CollaborativeAttention(DIM, HEADS, Causal() if causal else None, shared=SHARED).double())
    x = torch.randn(LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    up = torch.randn(LENGTH, DIM, dtype=torch.float64)
    ours, wanted = layer(x[None], Context(place(LENGTH))).y[0], one_by_one(layer, x, x, causal=causal)
    torch.testing.assert_close(ours, wanted, atol=1e-10, rtol=0)
    for got, want in zip(*(torch.autograd.grad((y * up).sum(), leaves) for y in (ours, wanted)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_another_sequence() -> None:
    layer = shaken(CollaborativeAttention(DIM, HEADS, shared=SHARED, source=CrossAttentionSource()).double())
    x, y = torch.randn(4, DIM).double(), torch.randn(6, DIM).double()
    found = layer(x[None], Context(place(4), MemorySequence(y[None], place(6)))).y[0]
    torch.testing.assert_close(found, one_by_one(layer, x, y, causal=False), atol=1e-10, rtol=0)


def test_one_key_is_kept_for_all_heads() -> None:
    layer = CollaborativeAttention(DIM, HEADS, Causal(), shared=SHARED)
    state = layer.init_state(2, capacity=5, device=torch.device("cpu"), dtype=torch.float32)
    assert state.source.k.shape == (2, 1, 5, SHARED + HEADS)
    assert state.source.v.shape == (2, 1, 5, DIM)


@pytest.mark.parametrize(("shared", "dim"), [(0, 12), (4, 13)])
def test_mistakes_get_a_sentence(shared: int, dim: int) -> None:
    with pytest.raises(ValueError, match=r"shared \(0\) must be|dim \(13\) must be"):
        CollaborativeAttention(dim, HEADS, shared=shared)


@pytest.mark.parametrize("recipe", ["transformer-lm", "bert"])
def test_with_all_dimensions_nothing_changes(recipe: str) -> None:
    model: Any = shaken(mf.build(recipe, **WORDS, dropout=0.0)).double().eval()
    found = mf.collaborate(model, shared=DIM)
    assert set(found.errors.values()) == {0.0}
    tokens, segments = torch.randint(0, 19, (2, 9)), torch.zeros(2, 9, dtype=torch.long)
    segments[1, 6:] = PADDING_SEGMENT
    ours, theirs = (one(tokens, segments).logits[segments == 0] for one in (found.model, model))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def planted(rank: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Heads of this width that use the same few dimensions of queries and keys, each in its own mixture."""
    random = np.random.default_rng(0)
    query, key, mixing = random.normal(size=(rank, DIM)), random.normal(size=(rank, DIM)), random.normal(size=(3, rank))
    spread = [np.linalg.qr(random.normal(size=(width, width)))[0][:, :rank] for _ in mixing]
    q = np.stack([s @ (m[:, None] * query) for s, m in zip(spread, mixing)])
    return q, np.stack([s @ key for s in spread])


def rebuilt(found: Any) -> np.ndarray:
    return np.einsum("xr,hr,yr->hxy", found.query, found.mixing, found.key)


def test_what_heads_share_is_found() -> None:
    pytest.importorskip("tensorly")
    q, k = planted(4, 6)
    products = np.einsum("hax,hay->hxy", q, k)
    errors = []
    for shared in (1, 2, 3, 4):
        found = factorize(q, k, shared, rounds=400, starts=3, seed=0)
        apart = np.linalg.norm(rebuilt(found) - products) / np.linalg.norm(products)
        assert found.error == pytest.approx(apart, abs=1e-9)
        errors.append(found.error)
    assert errors[-1] < 1e-3
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3


def test_the_first_start_is_never_worse_than_the_best_heads_apart() -> None:
    """Eckart and Young for each head, then least squares: what alternates can only get nearer."""
    pytest.importorskip("tensorly")
    random = np.random.default_rng(1)
    q, k = random.normal(size=(2, 3, 4, DIM))
    sizes = np.sort(np.linalg.svd(np.einsum("hax,hay->hxy", q, k), compute_uv=False).ravel())[::-1]
    apart = np.sqrt((sizes[5:] ** 2).sum() / (sizes**2).sum())
    assert factorize(q, k, 5, rounds=1, starts=1, seed=0).error < apart


def test_fewer_dimensions_come_near_and_say_how_near(tmp_path: Any) -> None:
    pytest.importorskip("tensorly")
    model: Any = mf.build("transformer-lm", **WORDS, dropout=0.0).eval()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, Attention):
                q, k = planted(4, DIM // HEADS)
                layer.q_proj.weight.copy_(torch.from_numpy(q.reshape(DIM, DIM)))
                layer.kv_proj.weight[:DIM].copy_(torch.from_numpy(k.reshape(DIM, DIM)))
                layer.q_proj.bias.normal_()
    found = mf.collaborate(model, shared=4, rounds=400, starts=3)
    assert all(0 < error < 1e-3 for error in found.errors.values())
    tokens = torch.randint(0, 19, (2, 9))
    logits = found.model(tokens).logits
    torch.testing.assert_close(logits, model(tokens).logits, atol=2e-2, rtol=0)
    found.model.save(tmp_path / "model")
    torch.testing.assert_close(mf.load(tmp_path / "model")(tokens).logits, logits)
    assert found.model.spec.keywords["shared_dim"] == 4


def test_what_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match="heads of performer cannot share dimensions"):
        mf.collaborate(mf.build("performer", vocab=5, dim=4, depth=1, heads=2, features=4), shared=2)
    with pytest.raises(UserError, match=r"shared \(13\) must be at least 1 and at most dim \(12\)"):
        mf.collaborate(mf.build("transformer-lm", **WORDS), shared=13)
    with pytest.raises(
        UserError, match="collaborative has no keyword residual_streams, which this model sets to reversible"
    ):
        mf.collaborate(mf.build("transformer-lm", **WORDS, residual_streams="reversible"), shared=4)
