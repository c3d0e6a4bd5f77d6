"""Processes that divide the columns of rows compute what one process computes, with gradients."""

import copy
import json
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.models import LanguageModel
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.kernels.kernel import TokenRing
from manyformer.training import silent
from manyformer.training.parallel_strategies import column_span, share_columns

TINY = {"vocab": 30, "dim": 32, "depth": 2, "heads": 4}
LENGTH = 32

Mailboxes = dict[tuple[int, int], "queue.Queue[list[Tensor]]"]


class ThreadRing(TokenRing):
    """A ring of threads, which copy what processes would send."""

    def __init__(self, rank: int, size: int, mailboxes: Mailboxes) -> None:
        super().__init__(rank, size)
        self.mailboxes = mailboxes

    def pass_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.send(tensors, (self.rank + 1) % self.size)
        return self.receive(tensors, (self.rank - 1) % self.size)

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        self.mailboxes[self.rank, rank].put([tensor.detach().clone() for tensor in tensors])

    def receive(self, like: Sequence[Tensor], rank: int) -> list[Tensor]:
        received = self.mailboxes[rank, self.rank].get(timeout=60)
        assert [tensor.shape for tensor in received] == [tensor.shape for tensor in like]
        assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in like]
        return received


def batch_of(*, packed: bool) -> CausalLMBatch:
    """Two rows; packed, documents begin and end within the parts of processes, and the last row ends with padding."""
    tokens = torch.randint(1, 30, (2, LENGTH))
    targets = torch.randint(1, 30, (2, LENGTH))
    if not packed:
        return CausalLMBatch(tokens, targets)
    segments = torch.tensor([[0] * 5 + [1] * 20 + [2] * 7, [0] * 18 + [1] * 4 + [-1] * 10])
    return CausalLMBatch(tokens, targets.masked_fill(segments < 0, IGNORE_INDEX), segments)


def loss_and_gradients(model: LanguageModel, batch: CausalLMBatch) -> tuple[Tensor, list[Tensor]]:
    model.loss(batch).total.backward()
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
    with torch.no_grad():
        return model.score(batch).nll, gradients


def in_threads(model: LanguageModel, batch: CausalLMBatch, size: int) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients, summed over threads that divide the columns."""
    mailboxes: Mailboxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def part(rank: int) -> tuple[Tensor, list[Tensor]]:
        ring, replica = ThreadRing(rank, size, mailboxes), copy.deepcopy(model)
        share_columns(replica, ring)
        return loss_and_gradients(replica, batch)

    with ThreadPoolExecutor(size) as threads:
        parts = list(threads.map(part, range(size)))
    return sum(nats for nats, _ in parts), [torch.stack(each).sum(0) for each in zip(*(g for _, g in parts))]


@pytest.mark.parametrize(("size", "packed"), [(2, False), (4, True)])
@pytest.mark.parametrize(
    ("recipe", "keywords"),
    [
        ("transformer-lm", {}),
        ("llama", {"kv_heads": 2, "window": 9}),
        ("longformer-lm", {"window": 6, "dropout": 0.0}),
        ("linear-transformer", {}),
        ("linear-transformer", {"update_rule": "delta"}),
        ("performer", {}),
        ("gla", {}),
        ("retnet", {}),
    ],
)
def test_parts_are_the_whole(recipe: str, keywords: dict[str, Any], size: int, packed: bool) -> None:
    model = mf.build(recipe, **TINY, **keywords)
    assert isinstance(model, LanguageModel)
    batch = batch_of(packed=packed)
    nats, gradients = in_threads(model, batch, size)
    expected_nats, expected = loss_and_gradients(model, batch)
    assert float(nats) == pytest.approx(float(expected_nats), rel=1e-5)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) + 1e-7)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("alibi", "AlibiPosition acts on scores"),
        ("transformer-xl", "keys come from SegmentMemorySource"),
        ("gmlp", "tokens meet in SpatialGate"),
        ("reformer", "tokens meet in ReversibleStack"),
        ("early-exit-lm", "whose only loss is that of the last layer"),
        ("bert", "it needs a language model"),
        ("mamba-2", "short convolutions read the tokens before"),
    ],
)
def test_other_recipes_are_refused(recipe: str, reason: str) -> None:
    with torch.device("meta"):
        model = mf.build(recipe, vocab=30)
    with pytest.raises(UserError, match=f"strategy=context cannot divide the rows of {recipe}: .*{reason}"):
        share_columns(model, ThreadRing(0, 2, {}))


def test_parts_must_be_equal() -> None:
    with pytest.raises(UserError, match="rows of 30 tokens among 4 processes, unequally"):
        column_span(30, ThreadRing(0, 4, {}))


AHEAD = {"tokens": 64, "accumulate": 2, "ahead": 2}
"""Batches that a thread of each process reads and divides before their turn."""


def a_run(text: Path, out: Path, **settings: Any) -> RunConfig:
    usual: dict[str, Any] = {
        "recipe": "transformer-lm",
        "model": {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.0},
        "data": {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16},
        "batch": {"tokens": 64, "accumulate": 2},
        "limits": {"steps": 8},
        "evaluate": {"every": 4},
        "save": {"every": 4},
        "log": {"every": 1},
        "device": "cpu",
        "out": str(out),
    }
    return RunConfig.model_validate(usual | settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "devices"), [("transformer-lm", 2), ("longformer-lm", 4), ("linear-transformer", 4), ("gla", 2)]
)
def test_processes_train_what_one_trains(recipe: str, devices: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be that is the question whether tis nobler in the mind " * 100)
    rows = []
    for name, settings in (("one", {}), ("several", {"devices": devices, "strategy": "context", "batch": AHEAD})):
        result = mf.train(a_run(text, tmp_path / name, recipe=recipe, **settings), on_event=silent)
        rows.append([json.loads(line) for line in (result.out / "metrics.jsonl").read_text().splitlines()])
    for name in ("loss", "valid_loss", "gradient_norm", "tokens"):
        one, several = ([row[name] for row in run if name in row] for run in rows)
        assert several == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data": {"kind": "text", "length": 18}, "devices": 4}, r"18 tokens must be a multiple of devices"),
        ({"data": {"kind": "text", "packing": "contiguous"}, "devices": 2}, "context divides rows that stand alone"),
        ({"recipe": "transformer", "data": {"kind": "pairs"}, "devices": 2}, "context divides rows of text"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RunConfig.model_validate({"recipe": "transformer-lm", "strategy": "context", **settings})
