"""Whole runs on the second device: the data of every task, evaluation, prediction, and an exact resume."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import documented_samples
import manyformer as mf
from manyformer.base.errors import TrainingInterrupted
from manyformer.inference.evaluate import evaluate, predict
from manyformer.models.tasks.requests import EvaluationSettings
from manyformer.training.events import TrainingEvent, TrainingProgress
from pretended_device import pretended_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
    pytest.mark.filterwarnings("ignore:.*CUDA"),
]

SMALL = ("dim=32", "depth=2", "heads=2", "limits.steps=2", "schedule.warmup=0", "evaluate.every=2", "save.every=2")
TEXT = ("data.tokenizer=char", "data.valid=0.2", "batch.tokens=256", *SMALL)
SOUND = ("data.path=sounds.npz", "data.sample_rate=8000", "data.mels=8", "batch.tokens=60", "data.valid=0.2")
IMAGES = ("data.path=mnist.npz", "batch.tokens=256", *SMALL)
PARTS = ("data.kind=modalities", "patch=4", "batch.tokens=100", *SMALL)
SEEN_AND_HEARD = ("data.path=parts.npz", "data.parts=[image, sound]", "data.mels=8", *PARTS)

RUNS: dict[str, tuple[str, ...]] = documented_samples.KINDS | {
    "answer-spans": ("longformer", "data.kind=questions", "data.path=spans.jsonl", *TEXT),
    "sentence-pairs": ("bert", "data.kind=sentence-pairs", "data.path=pairs.tsv", *TEXT),
    "graph-nodes": ("gat", "data.kind=graphs", "data.path=graphs.npz", "batch.tokens=64", *SMALL[1:]),
    "captions": ("captioner", "data.path=captions.npz", *PARTS),
    "several parts": ("multimodal-transformer", *SEEN_AND_HEARD),
    "contrast": ("clip", "shared_dim=8", *SEEN_AND_HEARD),
    "labels of sounds": ("audio-transformer-classifier", "data.kind=audio", "data.label=label", *SOUND, *SMALL),
    "transcripts": ("conformer", "data.kind=audio", *SOUND, *SMALL),
    "values of images": ("image-transformer", "data.kind=images", *IMAGES),
}
"""The words after `train` for each form of data."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    documented_samples.write_files(folder)
    random = np.random.default_rng(0)
    phrases = (folder / "train.en").read_text().splitlines()
    (folder / "pairs.tsv").write_text("".join(f"{phrase}\t{phrase[::-1]}\t{phrase[:2]}\n" for phrase in phrases))
    (folder / "spans.jsonl").write_text(
        "".join(f'{{"document": "{p}", "question": "how many?", "answer": "{p.split()[0]}"}}\n' for p in phrases)
    )
    np.savez(
        folder / "graphs.npz",
        edges=random.integers(0, 20, (40, 2)),
        labels=np.arange(20) % 2,
        features=random.normal(size=(20, 6)).astype(np.float32),
        train=np.arange(12),
        valid=np.arange(12, 16),
        test=np.arange(16, 20),
    )
    lengths = np.full(24, 2400)
    sounds = {"samples": random.integers(-9000, 9000, lengths.sum()).astype(np.int16), "lengths": lengths}
    words = np.array(["one two", "two", "two one"] * 8)
    np.savez(folder / "sounds.npz", **sounds, label=np.arange(24) % 2, text=words, sample_rate=np.array(8000))
    images = random.integers(0, 256, (24, 8, 8), dtype=np.uint8)
    splits = {"train": np.arange(18), "valid": np.arange(18, 24)}
    np.savez(folder / "captions.npz", images=images, texts=words, **splits)
    np.savez(
        folder / "parts.npz",
        images=images,
        samples=sounds["samples"],
        lengths=lengths,
        sample_rate=np.array(8000),
        labels=np.arange(24) % 2,
        **splits,
    )
    return folder


@pytest.fixture
def in_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    return files


def silent(event: TrainingEvent) -> None:
    pass


def train(name: str, out: str, *words: str, on_event: Callable[[TrainingEvent], None] = silent) -> Path:
    recipe, *settings = RUNS[name]
    mf.train(recipe, [*settings, f"out={out}", "device=cuda", *words], on_event=on_event)
    return Path(out)


LONG_ANSWERS = ("captions", "steps", "pairs", "returns")
"""Runs whose evaluation decodes many tokens, or acts."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG_ANSWERS else name for name in RUNS]
)
def test_data_of_every_form_is_trained_on_and_evaluated(in_files: Path, tmp_path: Path, name: str) -> None:
    with pretended_device() as waits:
        run = train(name, str(tmp_path / "run"))
        scores = evaluate(run, split="valid", device="cuda", settings=EvaluationSettings(beam=1)).scores
    assert scores
    # batches come from pinned memory
    assert not [wait for wait in waits.counts if wait.place.startswith("nn/batches/")], str(waits)


@pytest.mark.parametrize("name", ["labels", "images"])
def test_labels_are_predicted_on_the_device(in_files: Path, tmp_path: Path, name: str) -> None:
    with pretended_device():
        run = train(name, str(tmp_path / "run"))
        source = {"labels": "questions.txt", "images": "photos"}[name]
        on_device = list(predict(run, source, device="cuda"))
    on_cpu = list(predict(run, source, device="cpu"))
    assert on_device
    for found, right in zip(on_device, on_cpu, strict=True):
        ((label,),), ((expected,),) = found.prediction, right.prediction
        assert label.label == expected.label
        assert label.probability == pytest.approx(expected.probability, abs=1e-5)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(in_files: Path, tmp_path: Path) -> None:
    """Also with dropout, whose random numbers are those of the device, in bfloat16."""
    settings = ("model.dropout=0.2", "log.every=1", "precision=bfloat16")

    def interrupt(event: TrainingEvent) -> None:
        if isinstance(event, TrainingProgress) and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    with pretended_device():
        whole = train("text", str(tmp_path / "whole"), *settings)
    with pretended_device(), pytest.raises(TrainingInterrupted):
        train("text", str(tmp_path / "part"), *settings, on_event=interrupt)
    with pretended_device():
        torch.rand(7, device="cuda")
        part = train("text", str(tmp_path / "part"), *settings)
    expected, found = (mf.load(run).state_dict() for run in (whole, part))
    assert found.keys() == expected.keys()
    for weight, right in expected.items():
        assert torch.equal(found[weight], right), weight
