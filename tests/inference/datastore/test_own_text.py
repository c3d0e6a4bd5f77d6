"""Scored text that is in the datastore is refused, or has no part in its own neighbours."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import WORDS

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run as command
from manyformer.config import TextData
from manyformer.data.batching.text_epochs import NextTokenBatches, TextPlan
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.storage.neighbour_tables import open_neighbour_table
from manyformer.data.text.open_text import make_layout
from manyformer.inference.datastore import Datastore, KNNSettings, build, datastore_job, find_neighbours, knn_lm
from manyformer.inference.datastore.build_datastore import ContextReader
from manyformer.inference.datastore.knn_head import find_own_text
from manyformer.inference.datastore.tuning import score_datastore, tune
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch

# so many neighbours that no equally near ones are left out, as beginnings of documents are
SETTINGS = KNNSettings(600, 0.8, 0.3)
DOCUMENTS = [" ".join(random.Random(number).choices(WORDS, k=120)) for number in range(12)]


def write(file: Path, documents: list[str]) -> str:
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of packed documents, after two steps."""
    folder = tmp_path_factory.mktemp("own")
    write(folder / "train.jsonl", DOCUMENTS[:8])
    write(folder / "valid.jsonl", DOCUMENTS[8:10])
    data = ["data.path=train.jsonl", "data.valid=valid.jsonl", "data.tokenizer=char"]
    tiny = ["dim=16", "depth=2", "heads=2", "limits.steps=2", "data.length=32", "batch.tokens=128", "out=run"]
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert command(["train", "transformer-lm", *data, *tiny, "evaluate.every=null", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder / "run"


@pytest.fixture(scope="module")
def store(run: Path) -> Datastore:
    return build(datastore_job(run, precision="float32"), run / "train")


def nats(run: Path, store: Datastore, data: str, *, exclude_own: bool = False) -> tuple[float, float]:
    scores = score_datastore(run, store, SETTINGS, data=data, exclude_own=exclude_own)
    return tuple(scored["perplexity"].parts["nats"] for scored in (scores.model_scores, scores.combined_scores))  # type: ignore[return-value]


def test_without_overlap_scores_are_those_of_the_mixture(run: Path, store: Datastore, tmp_path: Path) -> None:
    fresh = write(tmp_path / "fresh.jsonl", DOCUMENTS[10:])
    scores = score_datastore(run, store, SETTINGS, data=fresh)
    assert scores.own_text.documents == 0
    assert scores.combined_scores["perplexity"].parts["nats"] == pytest.approx(_leaking(run, store, fresh), rel=1e-6)
    assert nats(run, store, fresh, exclude_own=True) == nats(run, store, fresh)


def _batches(run: Path, data: str) -> list[CausalLMBatch]:
    with open_run(run).open_data(None, data) as material:
        assert material.batches is not None
        return [batch for batch in material.batches if isinstance(batch, CausalLMBatch)]


@torch.no_grad()
def _leaking(run: Path, store: Datastore, data: str) -> float:
    """The nats of a mixture that excludes nothing."""
    mixture = knn_lm(mf.load(run), store, **SETTINGS._asdict())
    scores = [mixture.score(batch) for batch in _batches(run, data)]
    return float(sum(score.nll for score in scores)) / int(sum(score.targets for score in scores))


@pytest.mark.parametrize("copied", [(0, 1, 2, 3, 4, 5, 6, 7), (5,)])
def test_planted_text_is_refused_or_has_no_part_in_it(
    run: Path, store: Datastore, tmp_path: Path, copied: tuple[int, ...]
) -> None:
    """Excluded, a text gains from the datastore what it gains from a datastore of the other documents."""
    documents = [DOCUMENTS[number] for number in copied] + (DOCUMENTS[10:] if len(copied) == 1 else [])
    data = write(tmp_path / "scored.jsonl", documents)
    message = rf"scored.jsonl overlaps with .* in {len(copied)} of {len(documents)} documents, .* --exclude-own leaves"
    with pytest.raises(UserError, match=message):
        score_datastore(run, store, SETTINGS, data=data)
    with pytest.raises(UserError, match=message):
        tune(datastore_job(run), store, data=data)
    _, excluded = nats(run, store, data, exclude_own=True)
    tuned = tune(
        datastore_job(run), store, data=data, neighbours=[600], weights=[0.8], temperatures=[0.3], exclude_own=True
    )
    assert tuned.nats[tuned.best] / tuned.targets == pytest.approx(excluded, rel=1e-4)
    if len(copied) == len(documents):
        assert _leaking(run, store, data) < excluded - 0.5
    else:
        others = build(
            datastore_job(
                run, data=write(tmp_path / "others.jsonl", DOCUMENTS[:5] + DOCUMENTS[6:8]), precision="float32"
            ),
            tmp_path / "others",
        )
        expected = _only(run, store, others, data, copied)
        assert excluded == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def _only(run: Path, store: Datastore, others: Datastore, data: str, copied: tuple[int, ...]) -> float:
    """The nats of the first document with a datastore that never held it, and of the others with the whole one."""
    model, total, targets = mf.load(run), 0.0, 0
    length = len(DOCUMENTS[copied[0]]) + 2
    mixtures = [knn_lm(model, datastore, **SETTINGS._asdict()) for datastore in (others, store)]
    for batch in _batches(run, data):
        assert batch.text_positions is not None
        is_copied = batch.text_positions < length
        for mixture, part in zip(mixtures, (is_copied, ~is_copied)):
            score = mixture.score(batch._replace(targets=batch.targets.where(part, IGNORE_INDEX)))
            total, targets = total + float(score.nll), targets + int(score.targets)
    return total / targets


def test_the_command_names_the_option(run: Path, store: Datastore, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["datastore", "evaluate", str(run), str(store.folder), "--neighbours", "4"]
    data = ["--data", str(run.parent / "train.jsonl")]
    assert command([*words, *data]) == 2
    assert "in 8 of 8 documents, which would find their own tokens" in capsys.readouterr().err
    assert command([*words, *data, "--exclude-own"]) == 0
    assert (
        "100.0% of the text is in the datastore, too; documents that were excluded from their own neighbours: 8"
        in capsys.readouterr().out
    )
    assert command([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents excluded"] == 0


def test_neighbours_of_a_text_that_the_datastore_also_holds(run: Path, tmp_path: Path) -> None:
    """The datastore is of another file, which holds the training documents in another order."""
    held = [*DOCUMENTS[10:], *reversed(DOCUMENTS[:8])]
    store = build(
        datastore_job(run, data=write(tmp_path / "held.jsonl", held), precision="float32"), tmp_path / "store"
    )
    find_neighbours(datastore_job(run), store, tmp_path / "table", k=3)
    prepared = load_prepared(run / "data")
    assert prepared is not None
    shard = prepared.shards["train"]
    table = open_neighbour_table(str(tmp_path / "table"), shard, prepared.tokenizers.source.vocab)
    assert table is not None
    own = find_own_text(shard, store, prepared.tokenizers.source)
    assert own.overlap.overlapping.tolist() == list(range(8))
    # document i of the run is document 9 - i of the datastore
    assert own.starts[:, 0].tolist() == store.document_entries[9 - np.arange(8)].tolist()
    reader = ContextReader(datastore_job(run), shard)
    for index in range(len(reader)):
        positions, keys = reader.read(index)
        documents = 9 - (np.searchsorted(shard.offsets, positions, side="right") - 1)
        is_own = store.documents_of(np.arange(len(store))) == documents[:, None]
        distances = torch.cdist(torch.from_numpy(keys).double(), torch.from_numpy(np.array(store.keys)).double())
        nearest = distances.masked_fill(torch.from_numpy(is_own), torch.inf).sort(1)
        sure = (nearest.values[:, :4].diff(dim=1) > 1e-4).all(1)
        assert sure.float().mean() > 0.5
        expected = store.next_tokens(nearest.indices[:, :3])
        assert torch.equal(torch.from_numpy(table.lookup(positions))[sure], expected[sure])
    with pytest.raises(UserError, match=r"8 documents overlap with another text, .* leave out `min_distance`"):
        find_neighbours(datastore_job(run), store, tmp_path / "other", k=3, min_distance=4)


@pytest.mark.parametrize("packing", ["documents", "concat", "contiguous"])
def test_held_out_batches_know_the_positions_of_their_tokens(run: Path, packing: str) -> None:
    prepared = load_prepared(run / "data")
    assert prepared is not None
    shard, config = prepared.shards["valid"], open_run(run).config.data
    assert isinstance(config, TextData)
    layout = make_layout(config.model_copy(update={"packing": packing}), shard, 4, pad=0, shifted=True)
    plan = TextPlan(layout, 4, NextTokenBatches(), "")
    epoch = plan.fixed_epoch()
    for batch in map(epoch.batch, range(len(epoch))):
        assert isinstance(batch, CausalLMBatch)
        assert batch.text_positions is not None
        positions = batch.text_positions.numpy()
        assert (batch.tokens.numpy()[positions >= 0] == shard.tokens[positions[positions >= 0]]).all()
        assert (batch.targets.numpy()[positions < 0] == IGNORE_INDEX).all()
    trained_on = plan.epoch(0, 0).batch(0)
    assert isinstance(trained_on, CausalLMBatch)
    assert trained_on.text_positions is None
