"""A language model with neighbours: closed forms, brute force, and all that a language model promises."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import written
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.datastore import Datastore, KNNHead, knn_lm
from manyformer.inference.datastore.context_keys import KeyLayer, extract_keys
from manyformer.models import LanguageModel
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch

VOCAB = 29
RECIPES = [("transformer-lm", {}), ("transformer-xl", {"memory_length": 512})]


PROMISED = {"causal", "cached", "prefill", "preallocated", "rewind", "packing", "padding-left", "beams", "gradients"}


def model_of(recipe: str = "transformer-lm", **keywords: object) -> LanguageModel:
    torch.manual_seed(0)
    small = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.0}
    model = mf.build(recipe, **(small | keywords)).eval()
    assert isinstance(model, LanguageModel)
    return model


def reads(model: LanguageModel, name: KeyLayer) -> LanguageModel:
    return extract_keys(model, name).reader.eval()


def store_of(folder: Path, model: LanguageModel, *, name: KeyLayer = "final", copies: int = 1) -> Datastore:
    """Contexts of a random text, read by the model itself."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(5, VOCAB, (6, 20), generator=generator)
    with torch.no_grad():
        y = reads(model, name).hidden(texts).y[:, :-1, -16:]
    many = y.repeat(copies, 1, 1).flatten(0, 1).numpy()
    return written(folder, many, texts.repeat(copies, 1).tolist(), model=model, name=name)


def drawn(rows: int = 2, length: int = 15) -> Tensor:
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", ["final", "feed-forward"])
def test_the_distribution_by_brute_force(tmp_path: Path, name: KeyLayer) -> None:
    model = model_of()
    store = store_of(tmp_path, model, name=name)
    tokens = drawn()
    actual = knn_lm(model, store, neighbours=9, weight=0.3, temperature=2.0)(tokens).logits.exp().detach()
    keys = reads(model, name).hidden(tokens).y[..., -16:].detach()
    own = model(tokens).logits.softmax(-1).detach()
    for row in range(2):
        for column in range(15):
            distances = [
                float((keys[row, column] - torch.from_numpy(np.array(key))).square().sum()) for key in store.keys
            ]
            near = sorted(range(len(store)), key=distances.__getitem__)[:9]
            counts = np.exp([-distances[entry] / 2.0 for entry in near])
            expected = 0.7 * own[row, column]
            for entry, count in zip(near, counts / counts.sum()):
                expected[store.next_tokens(torch.tensor(entry))] += 0.3 * count
            torch.testing.assert_close(actual[row, column], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.sum(-1), torch.ones(2, 15))


def test_what_goes_into_the_last_feed_forward_layer_is_the_key(tmp_path: Path) -> None:
    model, tokens, seen = model_of(), drawn(), list[Tensor]()
    layer = model.body.get_submodule("1.ff.inner")
    handle = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    y = reads(model, "feed-forward").hidden(tokens).y
    handle.remove()
    assert y.shape[-1] == 32
    assert torch.equal(y[..., 16:], seen[-1])
    torch.testing.assert_close(y[..., :16], model.hidden(tokens).y)


def test_weights_at_their_limits(tmp_path: Path) -> None:
    model = model_of()
    store = store_of(tmp_path, model)
    tokens = drawn()
    alone = knn_lm(model, store, neighbours=5, weight=0.0)(tokens).logits
    torch.testing.assert_close(alone, model(tokens).logits.log_softmax(-1))
    nearest = knn_lm(model, store, neighbours=1, weight=1.0)(tokens).logits.exp()
    actual = store.search(model.hidden(tokens).y.reshape(-1, 16), 1)
    assert torch.equal(nearest.argmax(-1).flatten(), store.next_tokens(actual.entries)[:, 0])
    torch.testing.assert_close(nearest.amax(-1), torch.ones(2, 15))


def test_a_high_temperature_counts_neighbours(tmp_path: Path) -> None:
    model = model_of()
    store = store_of(tmp_path, model)
    actual = knn_lm(model, store, neighbours=len(store), weight=1.0, temperature=1e9)(drawn()).logits.exp()
    every = store.next_tokens(torch.arange(len(store)))
    torch.testing.assert_close(actual[0, 0], torch.bincount(every, minlength=VOCAB) / len(store), rtol=1e-4, atol=1e-6)


def test_twice_the_text_and_twice_the_neighbours_change_nothing(tmp_path: Path) -> None:
    model, tokens = model_of(), drawn()
    once, twice = (store_of(tmp_path / str(n), model, copies=n) for n in (1, 2))
    torch.testing.assert_close(
        knn_lm(model, once, neighbours=8)(tokens).logits, knn_lm(model, twice, neighbours=16)(tokens).logits
    )


@pytest.mark.parametrize(("recipe", "keywords"), RECIPES)
def test_it_promises_what_a_language_model_does(tmp_path: Path, recipe: str, keywords: dict[str, object]) -> None:
    model = model_of(recipe, **keywords)
    both = knn_lm(model, store_of(tmp_path, model, name="feed-forward"), neighbours=12, weight=0.4)
    report = mf.check(both, length=12, only=PROMISED)
    assert {row.contract: row.verdict for row in report.rows} == dict.fromkeys(PROMISED, "passed"), str(report)


COMPILED = """
import sys
from pathlib import Path
import manyformer as mf
from test_mixture import model_of, store_of

model = model_of()
combined = mf.knn_lm(model, store_of(Path(sys.argv[1]), model, name="feed-forward"), neighbours=12)
(row,) = mf.check(combined, length=16, only=["compile"]).rows
print(row.verdict, row.sentence)
"""


@pytest.mark.slow
def test_it_can_be_compiled(tmp_path: Path) -> None:
    """In a process of its own: the shape checks of the tests cannot be compiled."""
    folders = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("passed "), done.stdout + done.stderr


def test_it_writes_the_same_with_and_without_a_cache(tmp_path: Path) -> None:
    model = model_of("transformer-xl", memory_length=64)
    both = knn_lm(model, store_of(tmp_path, model, name="feed-forward"), neighbours=4, weight=0.6)
    answers = [mf.generate(both, [[5, 6, 7], [8]], max_new=8, use_cache=cache) for cache in (True, False)]
    assert [row[0].tokens for row in answers[0].rows] == [row[0].tokens for row in answers[1].rows]
    beam = mf.generate(both, [[5, 6, 7]], max_new=6, beam=3)
    assert len(beam.rows[0][0].tokens) == 6


def test_scores_and_losses_are_those_of_the_distribution(tmp_path: Path) -> None:
    model, tokens = model_of(), drawn()
    both = knn_lm(model, store_of(tmp_path, model), neighbours=6)
    targets = drawn(2, 15).roll(1, 1)
    targets[0, :3] = IGNORE_INDEX
    batch = CausalLMBatch(tokens, targets)
    log = both(tokens).logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -log[targets != IGNORE_INDEX].sum()
    score = both.score(batch)
    torch.testing.assert_close(score.nll, expected.double(), rtol=1e-5, atol=1e-5)
    assert int(score.targets) == 27
    loss = both.loss(batch)
    torch.testing.assert_close(loss.total, expected)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, store = model_of(), store_of(tmp_path, model_of())
    other = model_of()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    with pytest.raises(UserError, match="was built with another model"):
        knn_lm(other, store)
    for mix, sentence in (
        ({"weight": 1.5}, r"weight \(1.5\) must lie between 0 and 1"),
        ({"temperature": 0.0}, r"temperature \(0.0\) must be greater than 0"),
        ({"neighbours": 0}, r"neighbours \(0\) must be at least 1"),
        ({"neighbours": 115}, r"neighbours \(115\) must be at most 114"),
    ):
        with pytest.raises(UserError, match=sentence):
            knn_lm(model, store, **mix)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a MaskedLM predicts no next tokens"):
        knn_lm(mf.build("bert", vocab=VOCAB, dim=16, depth=1, heads=2), store)
    with pytest.raises(
        UserError, match="gmlp has no feed-forward layer whose input could be the key; use keys 'final'"
    ):
        extract_keys(mf.build("gmlp", vocab=VOCAB, dim=16, depth=1), "feed-forward")
    with pytest.raises(UserError, match="this LanguageModel was not built by a recipe, so it cannot be saved"):
        knn_lm(model, store).save(tmp_path / "both")
    head = knn_lm(model, store).head
    assert isinstance(head, KNNHead)
    assert "114 entries" in repr(head)
