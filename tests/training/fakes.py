"""Tiny data of every task for tests of training, made from nothing, in the shape that `manyformer.data` gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyformer.config import RunConfig
from manyformer.data.batching.epochs import FeedPosition, TrainingFeed
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer
from manyformer.nn.batches import (
    IGNORE_INDEX,
    Batch,
    CausalLMBatch,
    ClassificationBatch,
    MaskedLMBatch,
    Seq2SeqBatch,
    TaggingBatch,
)
from manyformer.nn.structures import preorder_columns

VOCAB = 11


class FakeUnits(NamedTuple):
    targets: int = 64
    characters: int = 64
    bytes: int = 64


def make(task: str, seed: int, rows: int = 4, length: int = 8) -> Batch:
    """A batch with a rule in it that can be learned: every token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(5, VOCAB, (rows, 1), generator=generator)
    chain = (start + torch.arange(length + 1) - 5) % (VOCAB - 5) + 5
    tokens, targets = chain[:, :-1].contiguous(), chain[:, 1:].contiguous()
    if task == "language-model":
        return CausalLMBatch(tokens, targets)
    if task == "translation":
        targets[0, -2:] = IGNORE_INDEX
        return Seq2SeqBatch(tokens, tokens, targets)
    if task == "masked-lm":
        chosen = torch.rand(tokens.shape, generator=generator) < 0.3
        chosen[:, 0] = True
        return MaskedLMBatch(tokens.masked_fill(chosen, 4), tokens.masked_fill(~chosen, IGNORE_INDEX))
    if task == "tagging":
        trees = torch.from_numpy(preorder_columns(range(length))).expand(rows, -1, -1)
        return TaggingBatch(tokens, tokens % 3, None, trees)
    return ClassificationBatch(tokens, start[:, 0] % 3)


class FakeSpan(NamedTuple):
    length: int


class FakeHeld:
    units = FakeUnits()
    rows_continue = False

    def __init__(self, task: str, rank: int = 0, world_size: int = 1) -> None:
        self.task, self.rank, self.world_size = task, rank, world_size

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        for seed in range(2):
            yield part(make(self.task, 1000 + seed), self.rank, self.world_size)

    def shard(self, rank: int, world_size: int) -> "FakeHeld":
        return FakeHeld(self.task, rank, world_size)


def part(batch: Batch, rank: int, world_size: int) -> Batch:
    return type(batch)(*(None if t is None else t[rank::world_size] for t in batch))


class FakeFeed(TrainingFeed):
    """Five batches an epoch."""

    batches = 5  # type: ignore[assignment]
    rows_continue = False  # type: ignore[assignment]

    def __init__(self, task: str, rank: int = 0, world_size: int = 1) -> None:
        self.task, self.rank, self.world_size = task, rank, world_size
        self.epoch = self.batch = 0

    def __next__(self) -> Batch:
        batch = part(make(self.task, 7 * self.epoch + self.batch), self.rank, self.world_size)
        self.batch += 1
        if self.batch == self.batches:
            self.epoch, self.batch = self.epoch + 1, 0
        return batch

    def shard(self, rank: int, world_size: int) -> "FakeFeed":
        return FakeFeed(self.task, rank, world_size)

    def state_dict(self) -> FeedPosition:
        return {"epoch": self.epoch, "batch": self.batch, "seed": 0, "data": "a rule"}

    def load_state_dict(self, state: FeedPosition) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


class FakeSource:
    def __init__(self, task: str) -> None:
        self.train, self.valid = FakeFeed(task), FakeHeld(task)
        self.length_limits = [FakeSpan(8)]
        self.required_keywords: dict[str, Any] = {"vocab": VOCAB}
        self.offered_keywords: dict[str, int] = {}
        if task in ("classification", "tagging"):
            self.required_keywords["classes"] = 3

    def glance(self) -> list[tuple[str, str]]:
        return [("data", line) for line in self.describe()]

    def describe(self) -> list[str]:
        return ["a rule, made up"]

    def check_length(self, longest: int | None) -> None:
        assert longest is None or longest >= 8

    def save(self, folder: Path) -> None:
        ByteTokenizer().save(folder / "tokenizer.json")


TASKS = {
    "transformer-lm": "language-model",
    "performer": "language-model",
    "transformer": "translation",
    "bert": "masked-lm",
    "transformer-classifier": "classification",
    "structural": "tagging",
}


def opener(run: RunConfig, out: Path, say: Callable[[str], None]) -> FakeSource:
    return FakeSource(TASKS[run.recipe])


def a_run(out: Path, recipe: str = "transformer-lm", **given: Any) -> RunConfig:
    """A run of a tiny model, with dropout, so that random numbers matter; `given` sections go over the usual ones."""
    usual: dict[str, Any] = {
        "recipe": recipe,
        "model": {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.1},
        "optim": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup": 2},
        "limits": {"steps": 12},
        "evaluate": {"every": 4},
        "save": {"every": 4},
        "log": {"every": 1},
        "device": "cpu",
        "out": str(out),
    }
    if recipe == "transformer":
        usual["data"] = {"kind": "pairs", "max_length": 8}
    elif recipe == "transformer-classifier":
        usual["data"] = {"kind": "labels", "path": "made-up", "max_length": 8}
    elif recipe == "structural":
        usual["data"] = {"kind": "trees", "path": "made-up", "max_length": 8}
    else:
        usual["data"] = {"kind": "text", "length": 8}
    return RunConfig.model_validate(usual | given)
