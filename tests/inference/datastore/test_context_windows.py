"""Evaluation with context: the sums of a plain loop over windows, whatever the batches, also for keys of datastores."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import OTHER, trained

import manyformer as mf
from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError
from manyformer.cli import run as command
from manyformer.data import load_tokenizers
from manyformer.inference.datastore import build, datastore_job
from manyformer.inference.datastore.tuning import score_datastore
from manyformer.inference.evaluate import Evaluation, evaluate
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.inference.evaluate.evaluate import score_model, window_reader
from manyformer.models import LanguageModel
from manyformer.training.run_folder import as_run

DOCUMENTS = [OTHER[:3], OTHER[:90], "crow", OTHER[40:65]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of which two are shorter than a stride, each a file."""
    folder = tmp_path_factory.mktemp("documents")
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(document)
    return folder


@pytest.fixture(scope="module")
def concat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows cross the borders of documents."""
    return trained(tmp_path_factory.mktemp("run"), "linear-transformer", "data.packing=concat")


def parts_of(row: list[int], length: int) -> Iterator[list[int]]:
    return (row[start : start + length] for start in range(0, len(row), length))


@torch.inference_mode()
def nats_by_hand(run: Path, documents: list[str], windows: ContextWindows, *, across: bool, memory: bool) -> float:
    """Each window by itself; the rows of the training are 32 tokens."""
    model, tokenizer = mf.load(run).eval(), load_tokenizers(run / "model").source
    assert isinstance(model, LanguageModel)
    texts = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in documents]
    total = 0.0
    for text in [list(itertools.chain(*texts))] if across else texts:
        scored = 1
        for start in range(0, len(text), windows.stride):
            row = text[start : start + windows.context]
            state, outputs = model.init_state(1) if memory else None, []
            for part in parts_of(row, 32) if memory else [row]:
                out = model(torch.tensor([part]), None, state)
                state = out.state
                outputs.append(out.logits[0])
            log_probs = torch.cat(outputs).log_softmax(-1)
            for position in range(scored, min(start + windows.context + 1, len(text))):
                if text[position] != tokenizer.bos:
                    total -= log_probs[position - 1 - start, text[position]].item()
                scored = position + 1
    return total


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("plain_run", ContextWindows(24, 8)),
        ("plain_run", ContextWindows(20, 20)),
        ("memory_run", ContextWindows(24, 8)),
        ("memory_run", ContextWindows(40, 5)),
        ("concat_run", ContextWindows(40, 5)),
    ],
)
def test_the_score_is_that_of_a_plain_loop(
    request: pytest.FixtureRequest, folder: Path, name: str, windows: ContextWindows
) -> None:
    run_folder: Path = request.getfixturevalue(name)
    evaluation = evaluate(run_folder, data=str(folder), windows=windows)
    documents = [file.read_text() for file in sorted(folder.iterdir())]
    nats = nats_by_hand(run_folder, documents, windows, across=name == "concat_run", memory=name == "memory_run")
    targets = sum(len(document) + 1 for document in DOCUMENTS)
    assert tokens_of(evaluation) == targets
    assert evaluation["perplexity"].parts["nats"] == pytest.approx(nats / targets, rel=1e-6)
    assert evaluation.reading == {"context": windows.context, "stride": windows.stride}
    assert f"windows of {windows.context}, {windows.stride} apart" in evaluation.how


def tokens_of(evaluation: Evaluation) -> int:
    return int(evaluation["perplexity"].signature.split("tokens:")[1].split("|")[0])


@torch.inference_mode()
def test_the_number_of_continued_rows_is_reported_and_changes_no_windows(memory_run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(OTHER)
    trained_run, model, windows = open_run(memory_run), mf.load(memory_run), ContextWindows(24, 8)
    nats: dict[ContextWindows | None, list[float]] = {None: [], windows: []}
    for lanes, (cut, values) in itertools.product((1, 4), nats.items()):
        batch = trained_run.config.batch.model_copy(update={"tokens": 32 * lanes})
        run = trained_run._replace(config=trained_run.config.model_copy(update={"batch": batch}))
        reader = model if cut is None else window_reader(model, cut, 32)
        with run.open_data(None, str(text), windows=cut) as data:
            result = score_model(reader, run.config, run.tokenizers, data, windows=cut)
        values.append(result.scores[0].parts["nats"])
        if cut is None:
            assert result.reading == {"lanes": lanes}
            assert result.scores[0].signature.endswith(f"|lanes:{lanes}")
            assert f"{lanes} lanes" in result.description
    assert nats[windows][0] == pytest.approx(nats[windows][1], rel=1e-6)
    assert nats[None][0] != pytest.approx(nats[None][1], rel=1e-6)


@pytest.mark.parametrize(("context", "stride"), [(8, 9), (8, 0), (None, 4)])
def test_strides_that_skip_tokens_are_refused(context: int | None, stride: int) -> None:
    with pytest.raises(UserError, match="stride"):
        ContextWindows.of(context, stride)


def test_a_context_beyond_the_positions_of_the_model_is_refused(plain_run: Path) -> None:
    with pytest.raises(UserError, match=r"the context .* at most 32, the model's max_length"):
        evaluate(plain_run, windows=ContextWindows(64, 32))


def test_keys_have_the_context_of_their_windows(memory_run: Path, folder: Path, tmp_path: Path) -> None:
    windows = ContextWindows(24, 8)
    job = datastore_job(memory_run, data=str(folder), keys="final", precision="float32", windows=windows)
    store = build(job, tmp_path / "store")
    assert store.facts.windows == windows
    (entry,) = [number for number, size in enumerate(store.text.lengths) if size == len(DOCUMENTS[1]) + 2]
    document = torch.from_numpy(
        store.text.tokens[store.text.offsets[entry] :][: len(DOCUMENTS[1]) + 2].astype(np.int64)
    )
    first = int(store.document_entries[entry])
    reader = job.extraction.reader.eval()
    with torch.inference_mode():
        for position in (5, 23, 24, 33, 88):
            start = max(0, -(-(position - 23) // 8) * 8)
            row = document[start : position + 1][None]
            key = reader.hidden(row, None, reader.init_state(1)).y[0, -1]
            assert torch.allclose(torch.from_numpy(np.array(store.keys[first + position])), key, atol=1e-5)
    # the scores beside it are read in the same windows
    scores = score_datastore(memory_run, store, store.load_settings(), data=str(folder), exclude_own=True)
    alone = evaluate(memory_run, data=str(folder), windows=windows)
    assert scores.model_scores["perplexity"].value == alone["perplexity"].value
    assert scores.combined_scores.reading == {"context": 24, "stride": 8}


def test_the_command_tells_context_and_stride(
    plain_run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(plain_run), "--data", str(folder), "--context", "16"]
    assert command([*words, "--stride", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["reading"] == {"context": 16, "stride": 4}
    assert printed["scores"][0]["signature"].endswith("|context:16|stride:4")
    assert math.isfinite(printed["scores"][0]["value"])
    assert command(words) == 0
    assert "windows of 16, 8 apart: each is predicted from 9 tokens at least" in capsys.readouterr().out.replace(
        "\n", " "
    )


@pytest.mark.parametrize("recipe", ["bert", "transformer"])
def test_a_context_is_for_language_models_of_text(plain_run: Path, recipe: str) -> None:
    run = open_run(plain_run)._replace(config=as_run(recipe))
    with (
        pytest.raises(UserError, match="a context is for language models"),
        run.open_data(None, None, windows=ContextWindows(8, 4)),
    ):
        pass
