"""Neighbours found once for a text, learned from, scored with, and found again while writing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from stores import trained

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.storage.neighbour_tables import open_neighbour_table
from manyformer.inference.datastore import Datastore, RetrievalAugmentedModel, build, datastore_job, find_neighbours
from manyformer.inference.evaluate import evaluate
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.models import LanguageModel
from manyformer.nn.batches import CausalLMBatch

K, APART = 3, 5


@pytest.fixture(scope="module")
def store(plain_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return build(datastore_job(plain_run, precision="float32"), tmp_path_factory.mktemp("stores") / "train")


@pytest.fixture(scope="module")
def found(plain_run: Path, store: Datastore) -> Path:
    out = store.folder.parent / "neighbours"
    said: list[tuple[int, int]] = []
    work = datastore_job(plain_run)
    splits = find_neighbours(work, store, out, k=K, min_distance=APART, on_progress=lambda *now: said.append(now))
    assert splits == ("train", "valid")
    assert said[-1][0] <= said[-1][1]
    return out


@pytest.fixture(scope="module")
def looking_run(found: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("spalm"), "spalm", "memory_length=8", f"data.neighbours={found}")


def test_neighbours_are_from_elsewhere(plain_run: Path, store: Datastore, found: Path) -> None:
    ready = load_prepared(plain_run / "data")
    assert ready is not None
    lookups = open_neighbour_table(str(found), ready.shards["train"], ready.tokenizers.source.vocab)
    assert lookups is not None
    keys = torch.from_numpy(np.array(store.keys))
    every = np.arange(len(store))
    distances = torch.cdist(keys.double(), keys.double())
    near = torch.from_numpy(abs(every[:, None] - every) <= APART)
    expected = distances.masked_fill(near, torch.inf).sort(1)
    # where the last of them is not as near as the one after it
    sure = (expected.values[:, K] - expected.values[:, K - 1] > 1e-4) & (
        expected.values.diff(dim=1)[:, : K - 1] > 1e-4
    ).all(1)
    assert sure.float().mean() > 0.5
    actual = torch.from_numpy(lookups.lookup(store.text_positions(every)))
    assert torch.equal(actual[sure], store.next_tokens(expected.indices[:, :K])[sure])


def test_it_learns_and_is_scored_with_them(looking_run: Path, found: Path) -> None:
    material = open_run(looking_run).load_split("valid")
    assert material.batches is not None
    batch = next(iter(material.batches))
    assert isinstance(batch, CausalLMBatch)
    assert batch.neighbours is not None
    assert batch.neighbours.shape == (*batch.tokens.shape, K)
    model = mf.load(looking_run)
    assert model.body.get_submodule("recall.gate").bias.abs() > 0, "the gate has learned"
    scored = evaluate(looking_run, split="valid")["perplexity"].parts["nats"]
    with torch.no_grad():
        sums = [model.score(one) for one in material.batches]
    assert scored == pytest.approx(float(sum(one.nll for one in sums) / sum(one.targets for one in sums)), rel=1e-5)
    with pytest.raises(UserError, match="holds no neighbours for this text with this tokenizer"):
        evaluate(looking_run, data=str(looking_run.parent / "other.txt"))


def test_writing_finds_them_as_it_goes(plain_run: Path, looking_run: Path, store: Datastore) -> None:
    model, retriever = mf.load(looking_run), mf.load(plain_run)
    assert isinstance(model, LanguageModel)
    both = RetrievalAugmentedModel(model, retriever, store, k=K)
    tokens = torch.randint(5, model.vocab, (2, 12))
    entries = store.search(both.retriever.hidden(tokens).y[..., -16:].flatten(0, 1), K).entries
    expected = model(tokens, neighbours=store.next_tokens(entries).view(2, 12, K)).logits
    torch.testing.assert_close(both(tokens).logits, expected)
    answers = [mf.generate(both, [[5, 6, 7], [8]], max_new=6, use_cache=cache) for cache in (True, False)]
    assert [row[0].tokens for row in answers[0].rows] == [row[0].tokens for row in answers[1].rows]
    with pytest.raises(UserError, match="this model does not use retrieved tokens"):
        RetrievalAugmentedModel(retriever, retriever, store)
    with pytest.raises(UserError, match="was built with another model"):
        RetrievalAugmentedModel(model, model, store)


def test_one_document_needs_a_distance(plain_run: Path, store: Datastore, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="the datastore's text is one document, all contexts of which would be excluded"
    ):
        find_neighbours(datastore_job(plain_run), store, tmp_path)
