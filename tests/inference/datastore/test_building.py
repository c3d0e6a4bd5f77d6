"""A datastore holds the state of the model at every token of a text, whatever happens while it is built."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import OTHER

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.datastore import Datastore, build, build_datastore, datastore_job, plan
from manyformer.inference.datastore.build_datastore import DatastoreJob, default_folder
from manyformer.inference.datastore.context_keys import extract_keys
from manyformer.models import LanguageModel
from manyformer.training.run_folder import locked_folder


def made(work: DatastoreJob, folder: Path) -> dict[str, bytes]:
    """All files of the datastore but hidden ones."""
    build(work, folder)
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


def test_keys_are_the_states_and_values_the_next_tokens(plain_run: Path, tmp_path: Path) -> None:
    work = datastore_job(plain_run, data=str(plain_run.parent / "other.txt"), precision="float32")
    store = build(work, tmp_path / "store")
    text = [1, *work.run.tokenizers.source.encode(OTHER), 2]
    assert store.text.tokens.tolist() == text
    assert len(store) == len(text) - 1
    assert store.next_tokens(torch.arange(len(store))).tolist() == text[1:]
    model = mf.load(plain_run)
    assert isinstance(model, LanguageModel)
    reader = extract_keys(model, "feed-forward").reader
    with torch.no_grad():
        # the run packs pieces of 32 tokens, each with what follows its last one
        pieces = [torch.tensor([text[begin : begin + 32]]) for begin in range(0, len(text) - 1, 32)]
        pieces[-1] = torch.tensor([text[(len(text) - 1) // 32 * 32 : len(text) - 1]])
        expected = torch.cat([reader.hidden(piece).y[0, :, 16:] for piece in pieces if piece.numel()])
    torch.testing.assert_close(torch.from_numpy(np.array(store.keys)), expected, rtol=1e-4, atol=1e-5)
    half = build(datastore_job(plain_run, data=str(plain_run.parent / "other.txt")), tmp_path / "half")
    assert half.keys.dtype == np.float16
    np.testing.assert_allclose(half.keys, store.keys, rtol=2e-3, atol=1e-3)


def test_lanes_carry_the_memory_into_the_keys(memory_run: Path, tmp_path: Path) -> None:
    work = datastore_job(memory_run, data=str(memory_run.parent / "other.txt"), keys="final", precision="float32")
    store = build(work, tmp_path / "store")
    model = mf.load(memory_run)
    assert isinstance(model, LanguageModel)
    tokens = torch.from_numpy(store.text.tokens.astype(np.int64))
    rows, targets = work.rows, len(tokens) - 1
    edges = [lane * targets // rows for lane in range(rows + 1)]
    for lane in range(rows):
        state, ours = model.init_state(1), tokens[edges[lane] : edges[lane + 1]]
        keys = []
        with torch.no_grad():
            for part in ours.split(32):
                out = model.hidden(part[None], None, state)
                state = out.state
                keys.append(out.y[0])
        stored = torch.from_numpy(np.array(store.keys[edges[lane] : edges[lane + 1]]))
        torch.testing.assert_close(stored, torch.cat(keys), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fixture", ["plain_run", "memory_run"])
def test_after_a_kill_it_goes_on_to_the_same_files(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_datastore, "SECONDS_PER_CHECKPOINT", 0.0)
    run: Path = request.getfixturevalue(fixture)
    work = datastore_job(run, keys="final")
    once, killed = tmp_path / "once", tmp_path / "killed"
    expected = made(work, once)
    calls: list[int] = []

    def kill(done: int, of: int) -> None:
        calls.append(done)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        build(work, killed, on_progress=kill)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert not (killed / "datastore.json").exists()
    with pytest.raises(UserError, match="is not finished: the same `manyformer datastore build` resumes it"):
        Datastore(killed)
    done: list[int] = []
    build(work, killed, on_progress=lambda now, of: done.append(now))
    assert 0 < len(done) < len(expected["keys"]) / (2 * 16 * 128)
    assert made(work, killed) == expected


def test_a_finished_one_is_left_as_it_is(plain_run: Path, tmp_path: Path) -> None:
    work, folder = datastore_job(plain_run, split="valid"), tmp_path / "store"
    expected = made(work, folder)
    done: list[int] = []
    build(work, folder, on_progress=lambda now, of: done.append(now))
    assert not done
    with pytest.raises(
        UserError, match=r"building.json is of a different datastore \(another keys\); choose another folder"
    ):
        build(datastore_job(plain_run, split="valid", keys="final"), folder)
    assert made(work, folder) == expected


def test_it_is_planned_before_it_is_built(plain_run: Path, tmp_path: Path) -> None:
    work = datastore_job(plain_run, split="valid")
    facts = plan(work)
    assert not default_folder(work).exists()
    store = build(work, tmp_path / "store")
    assert store.facts == facts
    assert facts.key_bytes == (tmp_path / "store" / "keys").stat().st_size == 2 * 16 * len(store)
    files = [tmp_path / "store" / name for name in ("keys", "text.tokens", "text.offsets")]
    assert facts.bytes == sum(file.stat().st_size for file in files)


def test_a_damaged_build_and_one_in_use_are_refused(plain_run: Path, tmp_path: Path) -> None:
    work, folder = datastore_job(plain_run, split="valid"), tmp_path / "store"
    build(work, folder)
    with locked_folder(folder), pytest.raises(UserError, match="is being built by another process"):
        build(work, folder)
    cut = shutil.copytree(folder, tmp_path / "cut")
    os.truncate(cut / "keys", 10)
    with pytest.raises(UserError, match="keys is damaged: it has 10 bytes instead of"):
        Datastore(cut)
    (cut / "datastore.json").write_text("{")
    with pytest.raises(UserError, match=r"datastore.json is damaged: it has 1 bytes instead of"):
        Datastore(cut)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"holds letter.txt and no datastore; choose another folder"):
        build(work, foreign)
    with pytest.raises(UserError, match="there is no datastore"):
        Datastore(tmp_path / "nowhere")


def test_keys_beyond_half_precision_are_refused(plain_run: Path, tmp_path: Path) -> None:
    work = datastore_job(plain_run, split="valid", keys="final")
    with torch.no_grad():
        for weight in work.model.body.get_submodule("norm").parameters():
            weight.mul_(1e6).add_(1e6)
    with pytest.raises(UserError, match=r"are beyond float16 \(up to .*\); use float32"):
        build(work, tmp_path / "store")
