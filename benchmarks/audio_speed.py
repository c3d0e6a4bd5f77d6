"""The time of features of recordings in a training step: reading, log-mel bands, SpecAugment, normalization.

    python benchmarks/audio_speed.py                      # the default model on 10 seconds of noise at 16 kHz
    python benchmarks/audio_speed.py spoken_digits.npz    # also the model of the run audio/digits on its data

Both are medians on one thread, of batches and of steps (forward, backward, AdamW) that take turns.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyformer as mf
from manyformer.config import AudioData
from manyformer.data import open_data
from manyformer.models import Model

STEPS, WARMUP = 15, 3
MASKS = {"frequency_masks": 2, "time_masks": 2}
RATE, SECONDS, RECORDINGS = 16_000, 10, 32


def noise_archive(folder: Path) -> Path:
    """Recordings of noise, each of 10 seconds."""
    samples = np.random.default_rng(0).normal(0, 0.1, RECORDINGS * SECONDS * RATE).astype(np.float32)
    lengths, labels = np.full(RECORDINGS, SECONDS * RATE), np.arange(RECORDINGS) % 2
    np.savez(folder / "noise.npz", samples=samples, lengths=lengths, label=labels, sample_rate=np.array(RATE))
    return folder / "noise.npz"


def measure(name: str, model: Model, section: AudioData, tokens: int, folder: Path) -> None:
    """Print the median milliseconds of a batch and of a step, and the share of the batch in both."""
    data = open_data(section, "labelled", batch_tokens=tokens, cache=folder / "cache", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = model.loss(batch)
        (loss.total / loss.targets).backward()
        optimizer.step()

    times: dict[str, list[float]] = {"batch": [], "step": []}

    def timed(kind: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        times[kind].append(time.perf_counter() - start)
        return result

    for _ in range(WARMUP + STEPS):
        batch = timed("batch", lambda: next(data.train))
        timed("step", lambda batch=batch: step(batch))
    features, steps = (1000 * statistics.median(values[WARMUP:]) for values in times.values())
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{name}, {count:,} parameters, batches of up to {tokens:,} frames")
    print(f"  features {features:8.2f} ms\n  step     {steps:8.2f} ms\n  share    {features / steps:8.3f} of a step")


def main() -> None:
    """Measure the models on one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digits", nargs="?", help="spoken_digits.npz")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        section = AudioData(path=str(noise_archive(folder)), valid=0.2, **MASKS)
        model = mf.build("audio-transformer-classifier", classes=2)
        measure("audio-transformer-classifier on noise", model, section, 8 * (SECONDS * 100 + 1), folder)
    if arguments.digits is None:
        return
    with tempfile.TemporaryDirectory() as name:
        rates = {"sample_rate": 8000, "archive_rate": 8000, "mels": 40}
        section = AudioData(path=arguments.digits, label="digit", **rates, **MASKS)
        model = mf.build("audio-transformer-classifier", mels=40, classes=10, dim=64, depth=4, heads=4, channels=16)
        measure("the run audio/digits", model, section, 2048, Path(name))


if __name__ == "__main__":
    main()
