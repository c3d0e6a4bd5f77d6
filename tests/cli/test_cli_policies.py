"""Policies on the command line: trained, scored, drawn, recorded; mistakes are sentences."""

from pathlib import Path

import numpy as np
import pytest
from commands import Cli
from PIL import Image

from manyformer.data.trajectories.episode_archives import read_archive, read_minari
from manyformer.training import silent, train

SETTINGS = [
    *("model.dim=8", "model.depth=1", "model.heads=2", "model.memory_length=6", "data.options={length: 4}"),
    # a rate at which the policies of two steps differ
    "optim.lr=0.3",
    *("data.rows=4", "data.steps=5", "data.passes=1", "data.valid=10", "limits.steps=2", "save.every=1", "device=cpu"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "run"
    train("gtrxl", [*SETTINGS, f"out={out}"], on_event=silent)
    return out


def test_scores_and_curves(run: Path, cli: Cli) -> None:
    ended = cli("evaluate", str(run), "--device", "cpu")
    assert ended.code == 0, ended.err
    assert "10 episodes of the likeliest actions" in ended.out
    assert "95% interval" in ended.out
    assert cli("plot", str(run), "--out", str(run / "returns.png")).code == 0


def test_an_episode_is_drawn(run: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "episode.gif"
    ended = cli("play", str(run), "--out", str(file), "--device", "cpu")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{file}: memory-length, 5 steps, return ")
    with Image.open(file) as picture:
        assert picture.n_frames == 5  # type: ignore[attr-defined]


def test_episodes_are_recorded(run: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "episodes.npz"
    ended = cli("record", str(run), "--random", "--episodes", "3", "--out", str(file), "--device", "cpu")
    assert ended.code == 0, ended.err
    assert "random: 3 episodes of memory-length, 15 steps, mean return" in ended.out
    with np.load(file, allow_pickle=False) as archive:
        assert archive["source"].tolist() == [str(run)] * 3 + ["random"] * 3
        assert archive["lengths"].tolist() == [5] * 6
        assert archive["observations"].shape == (30, 3)
    assert read_archive(file).lengths.tolist() == [5] * 6


def test_checkpoints_are_recorded(run: Path, tmp_path: Path, cli: Cli) -> None:
    """Each with its own policy, which differ, and the last one is that of the run."""
    folders = sorted(str(folder) for folder in (run / "checkpoints").iterdir())
    assert len(folders) > 1
    file = tmp_path / "stages.npz"
    ended = cli("record", *folders, "--episodes", "20", "--out", str(file), "--device", "cpu")
    assert ended.code == 0, ended.err
    with np.load(file, allow_pickle=False) as archive:
        assert archive["source"].tolist() == [folder for folder in folders for _ in range(20)]
    actions = {}
    for number, folder in enumerate((*folders, str(run))):
        single = tmp_path / f"{number}.npz"
        assert cli("record", folder, "--episodes", "200", "--out", str(single), "--device", "cpu").code == 0
        actions[folder] = read_archive(single).actions.tolist()
    assert actions[str(run)] == actions[folders[-1]] != actions[folders[0]]


def test_episodes_are_recorded_for_minari(run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    words = ["record", str(run), "--minari", "local/signs-v0", "--episodes", "3", "--likeliest", "--device", "cpu"]
    ended = cli(*words, "--out", str(tmp_path / "same.npz"))
    assert ended.code == 0, ended.err
    assert "wrote the local data set local/signs-v0" in ended.out
    archive, data_set = read_archive(tmp_path / "same.npz"), read_minari("minari:local/signs-v0")
    for left, right in zip(archive[:4], data_set[:4], strict=True):
        np.testing.assert_array_equal(left, right)
    again = cli(*words)
    assert (again.code, "this data set exists already" in again.err) == (2, True), again.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "gtrxl", "data.environment=memory-lenght"], "did you mean memory-length?"),
        (["play", "RUN", "--out", "episode.mp4"], "episode.mp4: an episode is drawn as .gif, not as '.mp4'"),
        (["play", "nothing"], "there is no folder nothing"),
        (["record", "--out", "x.npz"], "there is nothing to record: give a run, or --environment NAME --random"),
        (["record", "RUN"], "give --out FILE.npz or --minari NAME"),
        (["record", "RUN", "--minari", "pole"], "the name of a data set ends with its version"),
        (["record", "RUN", "--out", "x.txt"], "--out x.txt: episodes are written as .npz, not as '.txt'"),
        (["record", "RUN", "--environment", "CartPole-v1", "--out", "x.npz"], "are of one environment"),
        (["record", "--environment", "CartPole-v9", "--random", "--out", "x.npz"], "did you mean CartPole-v1"),
    ],
)
def test_play_and_record_refuse_in_one_sentence(words: list[str], message: str, run: Path, cli: Cli) -> None:
    ended = cli(*(str(run) if word == "RUN" else word for word in words))
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert "Traceback" not in ended.err
