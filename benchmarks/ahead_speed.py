"""What reading batches ahead hides of the time of the data (`batch.ahead`), and what it costs where nothing is hidden.

    python benchmarks/ahead_speed.py
    python benchmarks/ahead_speed.py --on-cpu

By default a sleep, which leaves the processor to the thread that reads, stands for the steps of a device: what is told
is the time in which a step waits for its batch. With `--on-cpu` small models are trained on this CPU,
with and without reading ahead in turns: the ratio is what `batch.ahead=auto` avoids there. Data is generated.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from manyformer.config import RunConfig
from manyformer.data import open_data
from manyformer.data.batching.epochs import TrainingFeed
from manyformer.data.pipeline.opened import OpenedData
from manyformer.nn.batches import Batch
from manyformer.training.ahead_feed import DEFAULT_AHEAD, AheadFeed
from manyformer.training.build_model import build_model
from manyformer.training.engine import PreparedBatch, TrainingEngine
from manyformer.training.process_group import DDPStrategy

WORDS = ["the", "red", "cat", "eats", "a", "quick", "brown", "fox", "and", "runs", "over", "lazy", "dogs"]


class DataCase(NamedTuple):
    """Generated data: its settings, its form, and the tokens of a batch."""

    settings: dict[str, Any]
    form: str
    tokens: int


class ModelCase(NamedTuple):
    """A small model for the data of a case, and the tokens of its batch."""

    recipe: str
    keywords: dict[str, Any]
    tokens: int


def sentence(draw: random.Random, longest: int) -> str:
    """Words of a sentence."""
    return " ".join(draw.choices(WORDS, k=draw.randint(3, longest)))


def data_cases(folder: Path) -> dict[str, DataCase]:
    """The data of each case, written to files of the folder."""
    draw, random_numbers = random.Random(0), np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(sentence(draw, 120) for _ in range(8000)))
    for name in ("a.en", "a.de"):
        (folder / name).write_text("".join(f"{sentence(draw, 20)}\n" for _ in range(20_000)))
    labelled = (f"{sentence(draw, 30)}\t{draw.choice('ab')}\n" for _ in range(20_000))
    (folder / "texts.tsv").write_text("".join(labelled))
    pictures = random_numbers.integers(0, 256, (400, 224, 224, 3), dtype=np.uint8)
    labels = np.arange(len(pictures)) % 2
    np.savez(folder / "images.npz", x_train=pictures, y_train=labels, x_test=pictures[:8], y_test=labels[:8])
    small = random_numbers.integers(0, 256, (4000, 28, 28), dtype=np.uint8)
    labels = np.arange(len(small)) % 10
    np.savez(folder / "digits.npz", x_train=small, y_train=labels, x_test=small[:100], y_test=labels[:100])
    lengths = random_numbers.integers(8000, 24_000, 600)
    np.savez(
        folder / "sounds.npz",
        samples=random_numbers.normal(0, 0.2, int(lengths.sum())).clip(-1, 1).astype(np.float32),
        lengths=lengths,
        label=np.arange(600) % 2,
        speaker=np.arange(600) // 2 % 10,
        sample_rate=np.array(8000),
    )
    text = {"kind": "text", "path": str(folder / "text.txt"), "tokenizer": "char"}
    pairs = {"kind": "pairs", "path": [str(folder / "a.en"), str(folder / "a.de")], "valid": 0.1, "tokenizer": "char"}
    texts = {"kind": "labels", "path": str(folder / "texts.tsv"), "valid": 0.1, "tokenizer": "char"}
    sounds = {"kind": "audio", "path": str(folder / "sounds.npz"), "sample_rate": 8000}
    return {
        "packed text": DataCase({**text, "length": 1024}, "next-token", 16_384),
        "masked text": DataCase({**text, "length": 512}, "masked", 16_384),
        "pairs of texts": DataCase(pairs, "pairs", 16_384),
        "table of texts": DataCase(texts, "labelled", 16_384),
        "images": DataCase({"kind": "images", "path": str(folder / "images.npz")}, "labelled", 64 * 224 * 224 * 3),
        "small images": DataCase({"kind": "images", "path": str(folder / "digits.npz")}, "labelled", 128 * 28 * 28),
        "recordings": DataCase(sounds, "labelled", 4000),
    }


MODELS = {
    "packed text": ModelCase("transformer-lm", {}, 2048),
    "masked text": ModelCase("bert", {}, 2048),
    "small images": ModelCase("vit", {"patch": 7}, 32 * 28 * 28),
    "table of texts": ModelCase("transformer-classifier", {}, 2048),
}


def opened(case: DataCase, folder: Path, tokens: int) -> OpenedData:
    """The data of a case, prepared in the folder."""
    run = RunConfig.model_validate({"recipe": "any", "data": case.settings})
    return open_data(run.data, case.form, batch_tokens=tokens, cache=folder / "data" / case.form, seed=0)


def counted(batch: Batch) -> PreparedBatch:
    """The batch with its counts, as an engine prepares it."""
    return PreparedBatch(batch, batch.target_count(), batch.token_count())


def waited(feed: TrainingFeed, steps: int, sleep: float) -> float:
    """The milliseconds in which a step waits for its batch, the median over some that sleep as a device works."""
    waits = []
    for _ in range(steps):
        start_time = time.perf_counter()
        batch = next(feed)
        batch.target_count(), batch.token_count()
        waits.append(time.perf_counter() - start_time)
        time.sleep(sleep / 1e3)
    return statistics.median(waits) * 1e3


def train_step(engine: TrainingEngine, feed: TrainingFeed) -> None:
    """One step of the optimizer on the next batch."""
    engine.step([next(feed)], 1e-4)


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """The time of a step, the mean over some."""
    start_time = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start_time) / steps * 1e3


def measure_beside_device(sleep: float, steps: int, rounds: int, folder: Path) -> None:
    """Print for each kind of data how long steps wait for it whose device computes for `sleep` milliseconds."""
    print(f"| data | waited in a step of {sleep:g} ms, none ahead | {DEFAULT_AHEAD} ahead | hidden |")
    print("|---|---|---|---|")
    for name, case in data_cases(folder).items():
        feed = opened(case, folder / name, case.tokens).train
        ahead = AheadFeed(opened(case, folder / name, case.tokens).train, DEFAULT_AHEAD, counted)
        times: dict[str, list[float]] = {"none": [], "ahead": []}
        for _ in range(rounds):
            times["none"].append(waited(feed, steps, sleep))
            # the first batch cannot be hidden by anything
            next(ahead)
            time.sleep(sleep / 1e3)
            times["ahead"].append(waited(ahead, steps, sleep))
            ahead.close()
        none, with_ahead = (statistics.median(column) for column in times.values())
        print(f"| {name} | {none:.1f} | {with_ahead:.1f} | {1 - with_ahead / none:.0%} |", flush=True)


def measure_on_cpu(steps: int, rounds: int, folder: Path) -> None:
    """Print the time of training steps on this CPU without and with reading ahead, in turns."""
    print("| data | recipe | none ahead, ms | 2 ahead, ms | median ratio of turns |")
    print("|---|---|---|---|---|")
    cases = data_cases(folder)
    for name, model_case in MODELS.items():
        case = cases[name]
        data = opened(case, folder / name, model_case.tokens)
        again = opened(case, folder / name, model_case.tokens)
        sizes = {"dim": 64, "depth": 2, "heads": 2, **model_case.keywords}
        run = RunConfig.model_validate({"recipe": model_case.recipe, "model": sizes, "data": case.settings})
        model = build_model(run, data, torch.device("cpu"))
        engine = TrainingEngine(model, run.optim, DDPStrategy())
        ahead = AheadFeed(again.train, DEFAULT_AHEAD, engine.prepare)
        times: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            feeds: tuple[TrainingFeed, TrainingFeed] = (data.train, ahead)
            pair = [milliseconds(partial(train_step, engine, feed), steps) for feed in feeds]
            ahead.close()
            times.append((pair[0], pair[1]))
        none, with_ahead = (statistics.median(column) for column in zip(*times[1:]))
        ratio = statistics.median(second / first for first, second in times[1:])
        print(f"| {name} | {model_case.recipe} | {none:.1f} | {with_ahead:.1f} | {ratio:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", type=float, default=20.0, help="milliseconds that a step of the device takes")
    parser.add_argument("--steps", type=int, default=40, help="steps of a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind, in turns")
    parser.add_argument("--on-cpu", action="store_true", help="train small models on this CPU instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.on_cpu:
            measure_on_cpu(options.steps, options.rounds, Path(folder))
        else:
            measure_beside_device(options.sleep, options.steps, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
