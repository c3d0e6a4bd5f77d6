"""The page of a kNN-LM shows the nearest contexts of each token, with their text and their shares."""

from pathlib import Path

import pytest
import torch

import manyformer as mf
from manyformer.analysis.viewer.model_view import SHOWN_NEIGHBOURS, view_text
from manyformer.cli import run
from manyformer.inference.datastore import build, datastore_job, knn_lm
from manyformer.inference.datastore.inspect_prompt import CONTEXT_TOKENS

PROMPT = "the cat sat by the door"


@pytest.mark.parametrize("fixture", ["plain_run", "memory_run"])
def test_the_map_has_the_nearest_entries_and_their_shares(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run_folder: Path = request.getfixturevalue(fixture)
    store = build(datastore_job(run_folder, precision="float32"), tmp_path / "store")
    model = knn_lm(mf.load(run_folder), store, neighbours=6, weight=0.3, temperature=2.0)
    retrieved = next(shown for shown in view_text(model, PROMPT).maps if shown.keys == "contexts")
    tokens = [model.tokenizer.bos, *model.tokenizer.encode(PROMPT)]
    middle = len(tokens) // 2 if model.carries_state else 0
    with torch.no_grad():
        state = model.init_state(1) if middle else None
        if middle:
            state = model.hidden(torch.tensor([tokens[:middle]]), None, state).state
        hidden = model.hidden(torch.tensor([tokens[middle:]]), None, state).y[0]
    assert len(retrieved.rows) == len(hidden)
    keys = torch.from_numpy(store.keys.copy())
    for key, weights in zip(hidden[:, -store.facts.width :], retrieved.weights[0], strict=True):
        distances = (keys - key).square().sum(-1)
        nearest = distances.topk(6, largest=False)
        shares = (-nearest.values / 2.0).softmax(-1)[:SHOWN_NEIGHBOURS]
        shown = weights.nonzero()[:, 0]
        torch.testing.assert_close(weights[shown].sort(descending=True).values, shares, rtol=1e-4, atol=1e-6)
        texts = {retrieved.columns[column] for column in shown.tolist()}
        # of entries that are equally far, any may be shown
        clearly_nearer = nearest.values < nearest.values[SHOWN_NEIGHBOURS] * (1 - 1e-4)
        for entry in nearest.indices[clearly_nearer].tolist():
            context, token, _ = store.context(entry, CONTEXT_TOKENS, 0)
            assert f"{''.join(map(model.tokenizer.token, context))} → {model.tokenizer.token(token)}" in texts


def test_the_command_writes_them(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(datastore_job(plain_run, precision="float32"), tmp_path / "store")
    page = tmp_path / "page.html"
    options = ["--datastore", str(tmp_path / "store"), "--out", str(page)]
    assert run(["view", str(plain_run), PROMPT, *options]) == 0
    assert "nearest contexts of the datastore" in page.read_text()
    assert run(["view", str(plain_run), PROMPT, "--datastore", str(tmp_path), "--out", str(page)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_datastore_of_another_model_is_refused(plain_run: Path, memory_run: Path, tmp_path: Path) -> None:
    build(datastore_job(plain_run, precision="float32"), tmp_path / "store")
    assert run(["view", str(memory_run), PROMPT, "--datastore", str(tmp_path / "store")]) == 2
