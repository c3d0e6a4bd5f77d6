"""Heads that share dimensions: what their scores are, and trained heads made to share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.base.errors import UserError
from manyformer.conversion.surgery.head_sharing import factorize
from manyformer.nn import Attention
from manyformer.nn.attention.collaborative_attention import CollaborativeAttention
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, MemorySequence, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.recipes import get_recipe
from perturbing import perturb
from token_rows import range_positions

DIM, HEADS, SHARED, LENGTH = 12, 3, 8, 7
WORDS: dict[str, Any] = {"vocab": 19, "dim": DIM, "depth": 2, "heads": HEADS, "ff_dim": 16, "max_length": 32}

SHARING = [
    *("audio-transformer-classifier", "bert", "bigbird-seq2seq", "captioner", "clip", "compose", "compose-images"),
    *("decision-transformer", "depth-adaptive-transformer", "early-exit-lm", "image-transformer-2d"),
    *("multimodal-transformer", "reformer-seq2seq", "sparse-transformer", "speech-transformer", "transformer"),
    *("transformer-classifier", "transformer-lm", "vit"),
]
"""Recipes with softmax attention and positions in the stream: nearly all."""


def takes_dropout(recipe: str) -> bool:
    return "dropout" in get_recipe(recipe).signature.parameters


def widest_attention(model: Any) -> int:
    return max(m.heads * m.kv_shape.head_dim for m in model.modules() if isinstance(m, Attention))


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
    grad_output = torch.randn(LENGTH, DIM, dtype=torch.float64)
    ours, expected = layer(x[None], Context(place(LENGTH))).y[0], one_by_one(layer, x, x, causal=causal)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad((y * grad_output).sum(), leaves) for y in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)


def test_another_sequence() -> None:
    layer = shaken(CollaborativeAttention(DIM, HEADS, shared=SHARED, source=CrossAttentionSource()).double())
    x, y = torch.randn(4, DIM).double(), torch.randn(6, DIM).double()
    actual = layer(x[None], Context(place(4), MemorySequence(y[None], place(6)))).y[0]
    torch.testing.assert_close(actual, one_by_one(layer, x, y, causal=False), atol=1e-10, rtol=0)


@torch.no_grad()
def test_one_key_is_kept_for_all_heads() -> None:
    """A step with kept keys sees what a full pass sees, and what is kept has one key of `shared` dimensions a token."""
    layer = shaken(CollaborativeAttention(DIM, HEADS, Causal(), shared=SHARED).double())
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    state = layer.init_state(2, capacity=5, device=torch.device("cpu"), dtype=torch.float64)
    assert state.source.k.shape == (2, 1, 5, SHARED + HEADS)
    assert state.source.v.shape == (2, 1, 5, DIM)
    outputs = []
    for column in range(5):
        y, state, _ = layer(x[:, column : column + 1], Context(range_positions(1, column)), state)
        outputs.append(y)
    full = layer(x, Context(place(5))).y
    torch.testing.assert_close(torch.cat(outputs, 1), full, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("shared", "dim"), [(0, 12), (4, 13)])
def test_mistakes_get_a_sentence(shared: int, dim: int) -> None:
    with pytest.raises(ValueError, match=r"shared \(0\) must be|dim \(13\) must be"):
        CollaborativeAttention(dim, HEADS, shared=shared)


@pytest.mark.parametrize("recipe", ["transformer-lm", "bert"])
def test_with_all_dimensions_nothing_changes(recipe: str) -> None:
    model: Any = shaken(mf.build(recipe, **WORDS, dropout=0.0)).double().eval()
    actual = mf.collaborate(model, shared=DIM)
    assert set(actual.errors.values()) == {0.0}
    tokens, segments = torch.randint(0, 19, (2, 9)), torch.zeros(2, 9, dtype=torch.long)
    segments[1, 6:] = PADDING_SEGMENT
    ours, reference = (one(tokens, segments).logits[segments == 0] for one in (actual.model, model))
    torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


def planted(rank: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Heads of this width that use the same few dimensions of queries and keys, each in its own mixture."""
    random = np.random.default_rng(0)
    query, key, mixing = random.normal(size=(rank, DIM)), random.normal(size=(rank, DIM)), random.normal(size=(3, rank))
    spread = [np.linalg.qr(random.normal(size=(width, width)))[0][:, :rank] for _ in mixing]
    q = np.stack([s @ (m[:, None] * query) for s, m in zip(spread, mixing)])
    return q, np.stack([s @ key for s in spread])


def rebuilt(found: Any) -> np.ndarray:
    return np.einsum("xr,hr,yr->hxy", found.query, found.mixing, found.key)


@pytest.mark.parametrize("rank", [4, 7])
def test_what_heads_share_is_found(rank: int) -> None:
    pytest.importorskip("tensorly")
    q, k = planted(rank, 8)
    products = np.einsum("hax,hay->hxy", q, k)
    errors = []
    for shared in (1, 2, 3, rank):
        actual = factorize(q, k, shared, rounds=400, starts=3, seed=0)
        apart = np.linalg.norm(rebuilt(actual) - products) / np.linalg.norm(products)
        assert actual.error == pytest.approx(apart, abs=1e-9)
        errors.append(actual.error)
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
    actual = mf.collaborate(model, shared=4, rounds=400, starts=3)
    assert all(0 < error < 1e-3 for error in actual.errors.values())
    tokens = torch.randint(0, 19, (2, 9))
    logits = actual.model(tokens).logits
    torch.testing.assert_close(logits, model(tokens).logits, atol=2e-2, rtol=0)
    actual.model.save(tmp_path / "model")
    torch.testing.assert_close(mf.load(tmp_path / "model")(tokens).logits, logits)
    assert actual.model.spec.keywords["shared_qk_dim"] == 4


@pytest.mark.parametrize(
    ("recipe", "keywords", "reason"),
    [
        ("performer", {"features": 4}, "body.0.attention cannot share dimensions, its kernel is LinearKernel"),
        ("roformer", {}, "RotaryPosition acts on queries, keys or scores"),
        ("fnet", {}, "must be null: no layer of this model has heads|no layer has queries and keys for each head"),
        ("longformer", {}, "no layer has queries and keys for each head"),
        ("universal-transformer-lm", {}, "its keys are those of halted tokens, too"),
        ("gcn", {}, "the heads of gcn cannot share dimensions: no layer has queries and keys for each head"),
        ("collaborative", {}, "no layer has queries and keys for each head"),
    ],
)
def test_heads_that_cannot_share_are_refused(recipe: str, keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        mf.collaborate(build_tiny(recipe, keywords, 0), shared=2)


def test_dimensions_keywords_and_removed_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"shared \(13\) must be at least 1 and at most dim \(12\)"):
        mf.collaborate(mf.build("transformer-lm", **WORDS), shared=13)
    with pytest.raises(UserError, match="collaborative has no keyword residual_streams, which this model sets"):
        mf.convert(mf.build("transformer-lm", **WORDS, residual_streams="reversible"), "collaborative", shared_dim=4)
    model = mf.build("transformer-lm", **WORDS, removed_heads="body.0.attention:1")
    with pytest.raises(UserError, match="let the heads of the full model share dimensions"):
        mf.convert(model, shared_qk_dim=4)


@pytest.mark.parametrize("recipe", SHARING)
def test_heads_of_every_recipe_share(recipe: str, tmp_path: Path) -> None:
    """With all dimensions a converted model computes the same, and it is built again from its keywords."""
    model = perturb(build_tiny(recipe, {"dropout": 0.0} if takes_dropout(recipe) else {}, 0), 0.1).double().eval()
    converted, errors = mf.collaborate(model, shared=widest_attention(model))
    assert set(errors.values()) == {0.0}
    shared_layers = [layer for layer in converted.modules() if isinstance(layer, CollaborativeAttention)]
    assert shared_layers
    assert not any(isinstance(layer, Attention) for layer in converted.modules())
    trial = ContractTrial(OwnSubject(model), torch.Generator().manual_seed(1), 24, 24, None, 1e-9)
    inputs = trial.draw(2, trial.round_length(12))
    expected = OwnSubject(model)(inputs).logits
    torch.testing.assert_close(OwnSubject(converted)(inputs).logits, expected, atol=1e-9, rtol=1e-9)
    converted.save(tmp_path / "model")
    loaded: Any = mf.load(tmp_path / "model").eval()
    torch.testing.assert_close(OwnSubject(loaded.double())(inputs).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", sorted({"transformer", "vit", "transformer-classifier", "captioner"}))
def test_new_models_have_shared_heads(recipe: str) -> None:
    model = build_tiny(recipe, {"shared_qk_dim": 3}, 0)
    layers = [layer for layer in model.modules() if isinstance(layer, CollaborativeAttention)]
    assert {layer.shared for layer in layers} == {3}
    report = mf.check(model, length=24, only=["repeatable", "gradients", "batch", "saving", "spec"])
    assert not report.failed, str(report)


def test_a_conversion_gives_a_recipe_its_keyword() -> None:
    model = perturb(mf.build("transformer", vocab=19, dim=DIM, depth=1, heads=HEADS, dropout=0.0), 0.3).eval()
    converted, report = mf.convert(model, shared_qk_dim=DIM)
    assert converted.spec.recipe == "transformer"
    assert converted.spec.keywords["shared_qk_dim"] == DIM
    assert report.difference is not None
    assert report.difference < 1e-4
    derived = {origin.name.rpartition(".attention")[0] for origin in report.origins if origin.kind == "derived"}
    assert {"encoder.0", "decoder.0"} <= derived
    with pytest.raises(UserError, match="no layer has queries and keys for each head"):
        mf.collaborate(converted, shared=4)
