"""Scorers that cheat, each in one known way, are told apart from those that only look odd."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.evaluators import TableModel, check_evaluator
from manyformer.analysis.contracts.scorers import check_scorer, windowed_scorer

VOCAB = 24
BLOCK = 16


class Averages(nn.Module):
    """A causal model: logits are a table's row plus the mean of what came before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return 3 * self.head(torch.tanh(x + x.cumsum(1) / counts))


def nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def plain() -> Callable[[Tensor], Tensor]:
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        return nats_of(model(tokens[None])[0, :-1], tokens[1:])

    return score


def sliding() -> Callable[[Tensor], Tensor]:
    model = Averages()
    return windowed_scorer(model, BLOCK, BLOCK // 4)


def legal_cache() -> Callable[[Tensor], Tensor]:
    """Counts of pairs of the tokens before, mixed with the model: a proper mixture, whose weight knows the past."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        probabilities = model(tokens[None])[0, :-1].softmax(-1)
        counts = torch.zeros(VOCAB, VOCAB)
        nats = []
        for index in range(1, tokens.numel()):
            row = counts[tokens[index - 1]] + 0.1
            mixed = 0.7 * probabilities[index - 1] + 0.3 * row / row.sum()
            nats.append(-mixed[tokens[index]].log())
            counts[tokens[index - 1], tokens[index]] += 1
        return torch.stack(nats)

    return score


def legal_training() -> Callable[[Tensor], Tensor]:
    """Trains on each block after it is scored, and forgets it at the end."""
    model = Averages()

    def score(tokens: Tensor) -> Tensor:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nats = []
        for start in range(0, tokens.numel() - 1, BLOCK):
            block = tokens[start : start + BLOCK + 1]
            losses = nats_of(model(block[None, :-1])[0], block[1:])
            nats.append(losses.detach())
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        model.load_state_dict(weights)
        return torch.cat(nats)

    return score


def trains_before_scoring() -> Callable[[Tensor], Tensor]:
    model = Averages()

    def score(tokens: Tensor) -> Tensor:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nats = []
        for start in range(0, tokens.numel() - 1, BLOCK):
            block = tokens[start : start + BLOCK + 1]
            nats_of(model(block[None, :-1])[0], block[1:]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            nats.append(nats_of(model(block[None, :-1])[0], block[1:]).detach())
        model.load_state_dict(weights)
        return torch.cat(nats)

    return score


def two_passes() -> Callable[[Tensor], Tensor]:
    """Counts the whole stream first."""

    def score(tokens: Tensor) -> Tensor:
        counts = torch.full((VOCAB, VOCAB), 0.1)
        counts.index_put_((tokens[:-1], tokens[1:]), torch.tensor(1.0), accumulate=True)
        return -(counts / counts.sum(-1, keepdim=True))[tokens[:-1], tokens[1:]].log()

    return score


def block_mean() -> Callable[[Tensor], Tensor]:
    """Every token sees the mean of its whole block."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        logits = model(tokens[None])[0, :-1]
        bias = torch.zeros_like(logits)
        for start in range(0, logits.shape[0], BLOCK):
            seen = tokens[start + 1 : start + BLOCK + 1]
            # the block without the target itself, so that probabilities still sum to 1
            counts = torch.bincount(seen, minlength=VOCAB).float()
            own = nn.functional.one_hot(seen, VOCAB).float()
            bias[start : start + BLOCK] = counts - own
        return nats_of(logits + bias, tokens[1:])

    return score


def scored_in_last_epoch() -> Callable[[Tensor], Tensor]:
    model = Averages()

    def score(tokens: Tensor) -> Tensor:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            losses = nats_of(model(tokens[None, :-1])[0], tokens[1:])
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        model.load_state_dict(weights)
        return losses.detach()

    return score


def calibrated_on_stream() -> Callable[[Tensor], Tensor]:
    """The scale of the logits is the best of the whole stream."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        logits = model(tokens[None])[0, :-1]
        # a fine grid: the best scale moves with every token
        losses = [nats_of(logits * scale, tokens[1:]) for scale in torch.linspace(-1, 1, 400)]
        return min(losses, key=lambda nats: float(nats.sum()))

    return score


def adapted_bias() -> Callable[[Tensor], Tensor]:
    """One offset for each block is fitted to the block and then used for it."""
    model = Averages()

    def score(tokens: Tensor) -> Tensor:
        nats = []
        for start in range(0, tokens.numel() - 1, BLOCK):
            block = tokens[start : start + BLOCK + 1]
            logits = model(block[None, :-1])[0].detach()
            bias = torch.zeros(VOCAB, requires_grad=True)
            (gradient,) = torch.autograd.grad(nats_of(logits + bias, block[1:]).sum(), bias)
            nats.append(nats_of(logits - 0.3 * gradient, block[1:]).detach())
        return torch.cat(nats)

    return score


def hashed_by_target() -> Callable[[Tensor], Tensor]:
    """A table of counts whose key contains the target; its buckets do not share one distribution."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        probabilities = model(tokens[None])[0, :-1].softmax(-1)
        hits: dict[int, float] = {}
        nats = []
        for index in range(1, tokens.numel()):
            key = (int(tokens[index - 1]) * 31 + int(tokens[index])) % 7
            count = hits.get(key, 0.0)
            blended = 0.5 * probabilities[index - 1, tokens[index]] + 0.5 * (count + 1) / (count + 2)
            nats.append(-blended.log())
            hits[key] = count + 1
        return torch.stack(nats)

    return score


def gated_by_target() -> Callable[[Tensor], Tensor]:
    """The weight of the mixture is the probability that the target has."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        first = model(tokens[None])[0, :-1].softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        second = torch.full_like(first, 1 / VOCAB)
        gate = first / (first + second)
        return -(gate * first + (1 - gate) * second).log()

    return score


def maximum_of_two() -> Callable[[Tensor], Tensor]:
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        nats = nats_of(model(tokens[None])[0, :-1], tokens[1:])
        return nats.clamp(max=math.log(VOCAB))

    return score


def target_in_logits() -> Callable[[Tensor], Tensor]:
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        logits = model(tokens[None])[0, :-1]
        return nats_of(logits + 2 * nn.functional.one_hot(tokens[1:], VOCAB), tokens[1:])

    return score


def unnormalized() -> Callable[[Tensor], Tensor]:
    """A blend of a distribution with numbers that sum to two."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        own = model(tokens[None])[0, :-1].softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return -(0.5 * own + 0.5 * 2 / VOCAB).log()

    return score


def dropped_tail() -> Callable[[Tensor], Tensor]:
    score = plain()
    return lambda tokens: score(tokens[: (tokens.numel() - 1) // BLOCK * BLOCK + 1])


def keeps_state() -> Callable[[Tensor], Tensor]:
    score = plain()
    calls: list[int] = []

    def keeping(tokens: Tensor) -> Tensor:
        calls.append(1)
        return score(tokens) / len(calls)

    return keeping


HONEST = [plain, sliding, legal_cache, legal_training]

CHEATS = [
    (trains_before_scoring, "causal-stream", f"within their own block of {BLOCK}"),
    (two_passes, "causal-stream", "the whole stream is read before it is scored"),
    (block_mean, "causal-stream", f"within their own block of {BLOCK}"),
    (scored_in_last_epoch, "causal-stream", "the whole stream is read before it is scored"),
    (calibrated_on_stream, "causal-stream", "the whole stream is read before it is scored"),
    (adapted_bias, "causal-stream", f"within their own block of {BLOCK}"),
    (hashed_by_target, "normalized", "depends on the token itself"),
    (gated_by_target, "normalized", "depends on the token itself"),
    (maximum_of_two, "normalized", "depends on the token itself"),
    (target_in_logits, "normalized", "depends on the token itself"),
    (unnormalized, "normalized", "depends on the token itself"),
    (dropped_tail, "counted", "of which"),
    (keeps_state, "repeatable-score", "a second call gives other scores"),
]


@pytest.mark.parametrize("make", HONEST)
def test_an_honest_scorer_is_called_dishonest(make: Callable[[], Any]) -> None:
    report = check_scorer(make(), VOCAB, block=BLOCK, length=51)
    assert report.ok, report


@pytest.mark.parametrize(("make", "contract", "words"), CHEATS)
def test_a_scorer_that_cheats_passes(make: Callable[[], Any], contract: str, words: str) -> None:
    report = check_scorer(make(), VOCAB, block=BLOCK, length=51, only=[contract])
    assert report[contract].verdict == "failed", report
    assert words in report[contract].sentence


def test_the_sum_of_a_vocabulary_of_bytes_is_measured_exactly() -> None:
    """The sum that is reported is that of the definition, over all tokens at the same position."""
    row = check_scorer(unnormalized(), VOCAB, block=BLOCK, length=40)["normalized"]
    # half of 1 and half of 2
    assert row.measured == pytest.approx(1.5, abs=1e-4)


@pytest.mark.parametrize("window", [8, 32])
@pytest.mark.parametrize("stride", [1, 5, 8])
def test_a_window_scores_every_target_once(window: int, stride: int) -> None:
    """A table model needs one token of context, so that windows of any size give its true nats."""
    model = TableModel(VOCAB)
    tokens = torch.randint(VOCAB, (101,), generator=torch.Generator().manual_seed(0))
    nats = windowed_scorer(model, window, stride)(tokens)
    torch.testing.assert_close(nats, model.nats(tokens), rtol=1e-6, atol=1e-6)


def mean_of(nats: Tensor) -> float:
    return float(nats.mean())


def strided_tail(model: nn.Module, tokens: Tensor, length: int = 256, stride: int = 64) -> float:
    """Windows begin every `stride` tokens until the last token; each that is cut short counts its own tail again."""
    losses: list[Tensor] = []
    for start in range(0, tokens.numel() - 1, stride):
        window = tokens[start : start + length + 1]
        nats = nats_of(model(window[None, :-1])[0], window[1:]).detach()
        losses.append(nats if start == 0 else nats[-stride:])
    return mean_of(torch.cat(losses))


def whole_batches(model: nn.Module, tokens: Tensor) -> float:
    rows = (tokens.numel() - 1) // 64
    inputs = tokens[: rows * 64].view(rows, 64)
    targets = tokens[1 : rows * 64 + 1].view(rows, 64)
    return float(model(inputs, targets)[1].detach())


def all_targets(model: nn.Module, tokens: Tensor) -> float:
    return float(model(tokens[None, :-1], tokens[None, 1:])[1].detach())


EVALUATORS: Sequence[tuple[Callable[..., float], str, str]] = [
    (all_targets, "passed", "the mean of 999 targets is right"),
    (whole_batches, "failed", "that of the first 960 of 999 targets: the tail is dropped"),
    (strided_tail, "failed", "counted more than once"),
]


@pytest.mark.parametrize(("evaluate", "verdict", "words"), EVALUATORS)
def test_a_mean_is_not_that_of_all_targets(evaluate: Callable[..., float], verdict: str, words: str) -> None:
    row = check_evaluator(evaluate, VOCAB)
    assert row.verdict == verdict, row
    assert words in row.sentence


def utf8_bytes(ids: Tensor) -> Tensor:
    return torch.ones_like(ids)


def bytes_of_damaged_text(ids: Tensor) -> Tensor:
    """Each byte is decoded alone; one that is no UTF-8 by itself becomes a sign of three bytes."""
    return torch.tensor([len(bytes([int(i)]).decode(errors="replace").encode()) for i in ids])


@pytest.mark.parametrize(("bytes_of", "verdict"), [(utf8_bytes, "passed"), (bytes_of_damaged_text, "failed")])
@pytest.mark.parametrize("option", ["encode", "decode"])
def test_bytes_of_tokens_are_not_those_of_the_text(bytes_of: Callable[..., Tensor], verdict: str, option: str) -> None:
    known: dict[str, Any] = {"encode": lambda text: list(text.encode())} if option == "encode" else {"decode": bytes}
    report = check_scorer(
        lambda t: torch.full((t.numel() - 1,), math.log(256)), 256, length=20, bytes_of=bytes_of, **known
    )
    assert report["bytes"].verdict == verdict, report


def test_documents_that_depend_on_each_other_pass() -> None:
    report = check_scorer(plain(), VOCAB, length=50, bos=0, only=["documents"])
    assert report["documents"].verdict == "failed"
    table = TableModel(VOCAB)
    assert check_scorer(table.nats, VOCAB, length=50, bos=0, only=["documents"])["documents"].verdict == "passed"


def test_a_size_of_batches_that_changes_scores_passes() -> None:
    def score(tokens: Tensor, rows: int = 1) -> Tensor:
        table = TableModel(VOCAB)
        return table.nats(tokens) + 0.1 * (rows - 1)

    report = check_scorer(score, VOCAB, length=30, partitions=[{"rows": 1}, {"rows": 2}], only=["partition"])
    assert "with rows=2 other scores come out" in report["partition"].sentence
