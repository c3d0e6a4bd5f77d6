"""`transcribe`: files written down from the command line, by CTC and by attention; runs are scored, others refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from commands import Cli, train

RATE = 8000
WORDS = ("low", "high")
TINY = ("dim=16", "depth=1", "heads=2", "channels=2", "data.mels=8", "data.tokenizer=word", "data.sample_rate=8000")
SHORT = ("limits.steps=40", "evaluate.every=20", "save.every=20", "batch.tokens=512", "optim.lr=0.01")


def tone(word: str, seconds: float = 0.3) -> np.ndarray:
    """A low or a high tone."""
    times = np.arange(round(seconds * RATE)) / RATE
    return 0.5 * np.sin(2 * np.pi * (300 if word == "low" else 1500) * times).astype(np.float32)


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tones of several lengths, one folder for each word."""
    folder = tmp_path_factory.mktemp("tones")
    for word in WORDS:
        (folder / word).mkdir()
        for number in range(20):
            soundfile.write(folder / word / f"{number}.wav", tone(word, 0.2 + 0.01 * number), RATE)
    return folder


@pytest.fixture(scope="module")
def ctc_run(tones: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("kernel_size=3", "evaluate.metric=label_error_rate", f"data.path={tones}")
    return train(tmp_path_factory.mktemp("ctc"), "conformer", *words, *TINY, *SHORT)


@pytest.fixture(scope="module")
def attention_run(tones: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("decoder_depth=1", "ff_dim=32", f"data.path={tones}")
    return train(tmp_path_factory.mktemp("attention"), "speech-transformer", *words, *TINY, *SHORT)


@pytest.mark.parametrize("run", ["ctc_run", "attention_run"])
def test_files_are_written_down_and_a_run_is_scored(
    cli: Cli, run: str, tones: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(run)
    files = [tmp_path / "a.wav", tmp_path / "b.flac"]
    for file, word in zip(files, WORDS):
        soundfile.write(file, tone(word), RATE)
    ended = cli("transcribe", str(folder), *map(str, files), "--json")
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in ended.out.splitlines()]
    assert [Path(record["input"]).name for record in records] == ["a.wav", "b.flac"]
    assert {record["text"] for record in records} <= {*WORDS, ""}
    assert all(record["log_probability"] <= 0 for record in records)
    ended = cli("transcribe", str(folder), str(files[0]), "--beam", "1")
    assert ended.out.startswith(f"{files[0]}\t")
    scores = {score["name"]: score for score in json.loads(cli("evaluate", str(folder), "--json").out)["scores"]}
    assert {"word_error_rate", "character_error_rate"} <= scores.keys()
    if run == "ctc_run":
        assert [record["text"] for record in records] == list(WORDS)
        assert scores["word_error_rate"]["value"] == 0


def test_other_runs_and_broken_files_are_refused(
    cli: Cli, ctc_run: Path, attention_run: Path, pairs_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.wav").write_bytes(b"RIFF0000")
    for words, sentence in (
        (("transcribe", str(ctc_run), str(tmp_path / "broken.wav")), "broken.wav"),
        (("transcribe", str(attention_run), str(tmp_path / "none.wav")), "none.wav"),
        (("transcribe", str(pairs_run), str(tmp_path)), "it is for translation"),
        (("translate", str(attention_run), "x"), "manyformer transcribe"),
        (("generate", str(ctc_run), "x"), "manyformer transcribe"),
        (("predict", str(ctc_run), str(tmp_path)), "manyformer transcribe"),
    ):
        ended = cli(*words)
        assert ended.code == 2, words
        assert sentence in ended.err


def test_attention_is_drawn_along_time(cli: Cli, ctc_run: Path, attention_run: Path, tmp_path: Path) -> None:
    file, picture = tmp_path / "a.wav", tmp_path / "a.png"
    soundfile.write(file, tone("low"), RATE)
    words = ("attention", str(attention_run), "--sound", str(file), "--out", str(picture))
    ended = cli(*words, "--answer", "high low", "--json")
    assert ended.code == 0, ended.err
    (maps,) = json.loads(ended.out).values()
    crossing = maps[-1]
    assert crossing["rows"] == ["high", "low", "<eos>"]
    # 0.3 seconds in tokens of four frames, one every 10 ms
    assert crossing["columns"] == [f"{0.04 * number:.2f}" for number in range(8)]
    assert cli(*words).code == 0
    assert picture.stat().st_size > 1000
    ended = cli("attention", str(ctc_run), "--sound", str(file), "--json")
    assert [len(part["columns"]) for part in next(iter(json.loads(ended.out).values()))] == [8]
    for refused, sentence in (
        (("attention", str(ctc_run), "--sound", str(file), "--answer", "low"), "only an encoder-decoder writes"),
        (("attention", str(ctc_run)), "a text or --sound to read"),
    ):
        ended = cli(*refused)
        assert ended.code == 2
        assert sentence in ended.err
