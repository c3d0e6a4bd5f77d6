"""Dense attention against released packages: training step, its memory, and decoding, all in one interleaved run.

    python benchmarks/dense_speed.py                          # about 2 minutes on two quiet cores
    python benchmarks/dense_speed.py --only step --rounds 3   # a glance

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round.
"""

import statistics
from collections.abc import Iterator

import frame
import torch
from peers import MODELS, Size, writer_of
from steps import language_step
from torch import nn

from manyformer.analysis.benchmarks import paired_ratio, take_turns

STEP = Size(dim=256, depth=4, heads=4, vocab=256, max_length=2048)
SHAPES = ((4, 512), (1, 2048))
STEP_GOALS = {"x-transformers": 1.0, "GPT-2": 0.9}
# the allocator rounds and splits: less than this share is no difference
MEMORY_GOALS = {"x-transformers": 1.02, "GPT-2": 1.02}

WRITE = Size(dim=384, depth=6, heads=6, vocab=256, max_length=1024)
PROMPT, NEW = 16, 128
# 1.6 times as many tokens a second
WRITE_GOAL = 1 / 1.6


def training(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time and extra memory of a training step."""
    for batch, length in SHAPES:
        tokens = torch.randint(0, STEP.vocab, (batch, length))
        steps = {name: language_step(model, tokens) for name, model in _models(STEP).items()}
        yield from frame.contest(f"training step, batch {batch} x {length}", steps, rounds, STEP_GOALS, MEMORY_GOALS)


def decoding(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time of writing one row."""
    prompt = torch.randint(0, WRITE.vocab, (1, PROMPT))
    writers = {name: writer_of(name, model, prompt, NEW) for name, model in _models(WRITE).items()}
    for name, write in writers.items():
        written = write().shape[-1]
        assert written == NEW, f"{name} wrote {written} tokens"
    times = take_turns(writers, rounds, frame.CPU)
    for name in writers:
        row: frame.BenchmarkRow = {"contest": f"decoding, {NEW} tokens after {PROMPT}", "candidate": name}
        row |= {"tokens_per_second": NEW / statistics.median(times[name])}
        if name != "ours":
            row |= {"ratio": paired_ratio(times["ours"], times[name])._asdict(), "goal": WRITE_GOAL}
        yield row


def _models(size: Size) -> dict[str, nn.Module]:
    return {name: make(size) for name, make in MODELS.items()}


if __name__ == "__main__":
    frame.run(__doc__, {"step": training, "decode": decoding}, rounds=15, out="dense_speed.json")
