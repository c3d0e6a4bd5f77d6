"""Tuning finds the setting of its grid that scoring finds best; people are shown what was found."""

from pathlib import Path

import pytest
import torch
from stores import TEXT

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.datastore import Datastore, KNNSettings, build, datastore_job, knn_lm
from manyformer.inference.datastore.inspect_prompt import inspect_prompt
from manyformer.inference.datastore.tuning import score_datastore, tune
from manyformer.inference.evaluate import evaluate
from manyformer.models import LanguageModel


@pytest.fixture(scope="module")
def store(plain_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return build(datastore_job(plain_run), tmp_path_factory.mktemp("store") / "train")


@pytest.mark.parametrize("fixture", ["plain_run", "memory_run"])
def test_every_setting_costs_what_scoring_says(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run: Path = request.getfixturevalue(fixture)
    work = datastore_job(run)
    store = build(work, tmp_path / "store")
    # of equally near contexts any may be chosen, and without a memory every row begins with few tokens
    few = 4 if fixture == "memory_run" else len(store)
    actual = tune(work, store, neighbours={few, len(store)}, weights=[0.0, 0.3, 0.8], temperatures=[0.5, 4.0])
    assert len(actual.nats) == (12 if few == 4 else 6)
    assert actual.nats[actual.best] == min(actual.nats.values())
    # after two steps of training the text itself knows better
    assert actual.best.weight == 0.8
    for mix in (actual.best, KNNSettings(few, 0.3, 4.0), KNNSettings(len(store), 0.0, 0.5)):
        scored = evaluate(run, split="valid", wrap=lambda model, mix=mix: knn_lm(model, store, **mix._asdict()))  # type: ignore[misc]
        nats = scored["perplexity"].parts["nats"] * actual.targets
        assert actual.nats[mix] == pytest.approx(nats, rel=1e-4)
    store.save_settings(actual.best)
    assert store.load_settings() == actual.best
    assert Datastore(store.folder).load_settings() == actual.best


def test_a_glance_at_some_of_the_text(plain_run: Path, store: Datastore) -> None:
    other = str(plain_run.parent / "other.txt")
    actual = tune(
        datastore_job(plain_run), store, data=other, neighbours=[8], weights=[0.5], temperatures=[1.0], max_tokens=50
    )
    assert (actual.targets, actual.data_name) == (50, other)
    with pytest.raises(UserError, match="there is nothing to try"):
        tune(datastore_job(plain_run), store, weights=[])


def test_with_and_without(plain_run: Path, store: Datastore) -> None:
    said: list[str] = []
    actual = score_datastore(plain_run, store, KNNSettings(16, 0.8, 1.0), split="valid", on_status=said.append)
    assert actual.model_scores["perplexity"].value == pytest.approx(
        evaluate(plain_run, split="valid")["perplexity"].value
    )
    assert actual.combined_scores["perplexity"].value < actual.model_scores["perplexity"].value
    assert min(actual.model_speed, actual.combined_speed) > 0
    assert said[-1].endswith("train: 100%")


def test_what_was_found_is_shown(plain_run: Path, store: Datastore) -> None:
    model = mf.load(plain_run)
    both = knn_lm(model, store, neighbours=20, weight=0.9)
    actual = inspect_prompt(both, "the dog lay by the d", num_neighbours=6, num_guesses=4)
    assert len(actual.neighbours) == 6
    assert [one.distance for one in actual.neighbours] == sorted(one.distance for one in actual.neighbours)
    first = actual.neighbours[0]
    assert len(first.context) == 12
    assert len(first.token) == 1
    assert len(first.continuation) == 4
    assert f"{first.context}{first.token}{first.continuation}" in TEXT
    assert 0 < first.weight <= 1
    tokens = torch.tensor([[1, *model.tokenizer.encode("the dog lay by the d")]])
    likely = both(tokens).logits[0, -1].exp().topk(4)
    assert [guess.token for guess in actual.guesses] == [model.tokenizer.token(t) for t in likely.indices.tolist()]
    assert [guess.combined for guess in actual.guesses] == pytest.approx(likely.values.tolist(), rel=1e-4)
    few = inspect_prompt(knn_lm(model, store, neighbours=2), "the", num_neighbours=5)
    assert [one.weight > 0 for one in few.neighbours] == [True, True, False, False, False]
    assert isinstance(model, LanguageModel)
    with pytest.raises(UserError, match="this model does not retrieve from a datastore"):
        inspect_prompt(model, "the")
