"""Scorers that cheat, each in one known way, are told apart from those that only look odd."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.evaluators import TableModel, check_evaluator, check_evaluator_report
from manyformer.analysis.contracts.scorers import check_scorer, scorer_of_model, windowed_scorer
from manyformer.base.errors import UserError

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
    report = check_scorer(make(), VOCAB, block=BLOCK, length=30)
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


Change = Callable[[Tensor, Tensor], Tensor]
"""Gives other nats, from those of a plain scorer and the stream."""


def changed(change: Change) -> Callable[[], Callable[[Tensor], Tensor]]:
    """A plain scorer whose nats are changed."""

    def make() -> Callable[[Tensor], Tensor]:
        score = plain()
        return lambda tokens: change(score(tokens).clone(), tokens)

    return make


def rare_targets_see_the_next(nats: Tensor, tokens: Tensor) -> Tensor:
    hides = (tokens[1:-1] % 12 == 5) & (tokens[2:] % 2 == 0)
    nats[:-1] -= 0.3 * hides
    return nats


def every_13th_sees_the_next(nats: Tensor, tokens: Tensor) -> Tensor:
    nats[3:-1:13] += 0.1 * (tokens[5::13][: nats[3:-1:13].numel()] % 3)
    return nats


def second_half_sees_the_last(nats: Tensor, tokens: Tensor) -> Tensor:
    half = nats.numel() // 2
    nats[half:-1] += 0.01 * (tokens[-1] % 2)
    return nats


def every_seventh_is_raised(nats: Tensor, tokens: Tensor) -> Tensor:
    nats[4::7] -= math.log(1.2)
    return nats


def first_is_free(nats: Tensor, tokens: Tensor) -> Tensor:
    nats[0] = 0
    return nats


def shifted(nats: Tensor, tokens: Tensor) -> Tensor:
    return nats.roll(1)


def temperature_of_target(nats: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(tokens[1:] % 2 == 0, nats * 0.9, nats)


def hard_ones_are_free(nats: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(nats > 2 * math.log(VOCAB), 0.0, nats)


def hard_ones_are_dropped(nats: Tensor, tokens: Tensor) -> Tensor:
    return nats[nats < 1.5 * math.log(VOCAB)]


def easy_ones_count_twice(nats: Tensor, tokens: Tensor) -> Tensor:
    return torch.cat([nats, nats[nats < 2]])


def some_are_no_numbers(nats: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(tokens[1:] % 8 == 3, math.nan, nats)


HARD_CHEATS: list[tuple[Change, str, str]] = [
    (rare_targets_see_the_next, "causal-stream", "it is scored after a later token was read|within their own block"),
    (every_13th_sees_the_next, "causal-stream", "changes when token"),
    (second_half_sees_the_last, "causal-stream", "change when token 50 does"),
    (every_seventh_is_raised, "normalized", r"sum to 1\.2:"),
    (lambda nats, tokens: nats - math.log(1.01), "normalized", r"sum to 1\.01:"),
    (first_is_free, "normalized", "position 1 sum to 24: every token gets the same score there"),
    (shifted, "normalized", "every token gets the same score"),
    (temperature_of_target, "normalized", "depends on the token itself"),
    (hard_ones_are_free, "normalized", "depends on the token itself"),
    (lambda nats, tokens: nats - 2, "normalized", "nats: a probability above 1"),
    (hard_ones_are_dropped, "counted", "of which 50 are targets"),
    (easy_ones_count_twice, "counted", "of which 50 are targets"),
    (some_are_no_numbers, "counted", "is not a number"),
]


@pytest.mark.parametrize(("change", "contract", "words"), HARD_CHEATS)
def test_a_cheat_at_a_few_tokens_passes(change: Change, contract: str, words: str) -> None:
    report = check_scorer(changed(change)(), VOCAB, length=51, only=[contract, "normalized"])
    assert report[contract].verdict == "failed", report
    assert re.search(words, report[contract].sentence), report


def weak_hash() -> Callable[[Tensor], Tensor]:
    """Counts by the target's hash, which give each token two percent of a probability that is no distribution."""
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        probabilities = model(tokens[None])[0, :-1].softmax(-1)
        hits: set[int] = set()
        nats = []
        for index in range(1, tokens.numel()):
            key = (int(tokens[index - 1]) * 31 + int(tokens[index])) % 17
            nats.append(-(0.98 * probabilities[index - 1, tokens[index]] + 0.02 * (key in hits)).log())
            hits.add(key)
        return torch.stack(nats)

    return score


def test_a_table_with_a_small_weight_passes() -> None:
    row = check_scorer(weak_hash(), VOCAB, length=30, only=["normalized"])["normalized"]
    assert row.verdict == "failed", row


def warm_start(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """Counts the first stream and keeps its counts: equal calls agree, and no weight changes."""
    model = Averages()
    counts: dict[str, Tensor] = {}

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        counts.setdefault("first", torch.bincount(tokens, minlength=VOCAB) * 0.1)
        return nats_of(model(tokens[None])[0, :-1] + counts["first"], tokens[1:])

    return score


def kept_file(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    model = Averages()
    path = tmp_path / "counts.pt"

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        if not path.exists():
            torch.save(torch.bincount(tokens, minlength=VOCAB) * 0.1, path)
        return nats_of(model(tokens[None])[0, :-1] + torch.load(path), tokens[1:])

    return score


def after_many_calls(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    score = plain()
    calls: list[int] = []

    def later(tokens: Tensor) -> Tensor:
        calls.append(1)
        return score(tokens) * (1 if len(calls) < 30 else 0.99)

    return later


class TrainsOnce:
    """Trains on the first stream alone."""

    def __init__(self) -> None:
        self.model = Averages()
        self.trained = False

    def __call__(self, tokens: Tensor) -> Tensor:
        if not self.trained:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            nats_of(self.model(tokens[None])[0, :-1], tokens[1:]).mean().backward()
            optimizer.step()
            self.trained = True
        return nats_of(self.model(tokens[None])[0, :-1].detach(), tokens[1:])


KEEPING: list[tuple[Callable[[Path], Any], str]] = [
    (warm_start, "depend on the streams before it, which counts keeps"),
    (kept_file, r"counts.pt and read it again"),
    (after_many_calls, "after the calls of this check|a second call"),
    (lambda tmp_path: TrainsOnce(), "a call changes model.embedding.weight"),
]


@pytest.mark.parametrize(("make", "words"), KEEPING)
def test_what_is_kept_between_streams_passes(make: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    report = check_scorer(make(tmp_path), VOCAB, length=40, only=["repeatable-score", "partition", "normalized"])
    assert report["repeatable-score"].verdict == "failed", report
    assert re.search(words, report["repeatable-score"].sentence), report


def scratch_file(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """Writes its logits to a file and reads them in the same call."""
    score = plain()

    def through_file(tokens: Tensor) -> Tensor:
        torch.save(score(tokens), tmp_path / "scratch.pt")
        return torch.load(tmp_path / "scratch.pt")

    return through_file


def caches_in_buffers(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """Buffers and tables that every call fills anew, and a count of calls."""
    model = Averages()
    model.register_buffer("keys", torch.zeros(100, 16))
    memo: dict[int, int] = {}

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        model.get_buffer("keys")[: tokens.numel()] = model.embedding(tokens)
        memo[len(memo)] = tokens.numel()
        return nats_of(model(tokens[None])[0, :-1], tokens[1:])

    return score


def padded_vocabulary(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    model = Averages()

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        logits = model(tokens[None])[0, :-1].clone()
        logits[:, -3:] = -math.inf
        return nats_of(logits, tokens[1:])

    return score


def copies(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """Nearly sure of what followed a token the last time: its sums hang on one token of the vocabulary."""

    def score(tokens: Tensor) -> Tensor:
        last: dict[int, int] = {}
        nats = []
        for before, after in pairwise(tokens.tolist()):
            rest = 0.01 if before in last else 1.0
            nats.append(-math.log(rest / VOCAB + (1 - rest) * (last.get(before) == after)))
            last[before] = after
        return torch.tensor(nats)

    return score


def rounded(dtype: torch.dtype) -> Callable[[Path], Any]:
    def make(tmp_path: Path) -> Callable[[Tensor], Tensor]:
        score = plain()
        return lambda tokens: score(tokens).to(dtype)

    return make


def noisy(size: float) -> Callable[[Path], Any]:
    """Sums in another order in each call."""

    def make(tmp_path: Path) -> Callable[[Tensor], Tensor]:
        model = Averages()

        @torch.no_grad()
        def score(tokens: Tensor) -> Tensor:
            logits = model(tokens[None])[0, :-1]
            return nats_of(logits + size * torch.randn(logits.shape), tokens[1:])

        return score

    return make


ODD: list[Callable[[Path], Any]] = [
    scratch_file,
    caches_in_buffers,
    padded_vocabulary,
    copies,
    rounded(torch.bfloat16),
    rounded(torch.float16),
    noisy(1e-6),
    noisy(4e-3),
    lambda tmp_path: lambda tokens: torch.full((tokens.numel() - 1,), math.log(VOCAB)),
]


@pytest.mark.parametrize("make", ODD)
def test_an_odd_scorer_is_called_dishonest(make: Callable[[Path], Any], tmp_path: Path) -> None:
    report = check_scorer(make(tmp_path), VOCAB, length=20)
    assert report.ok, report
    assert report["normalized"].verdict == "passed"


def test_a_sample_of_a_large_vocabulary_calls_sure_models_dishonest() -> None:
    """One token has nearly all of the probability: whether it is in the sample or not says nothing."""
    vocab = 9000

    def sure(tokens: Tensor) -> Tensor:
        follows = (tokens[:-1] * 7 + 1) % vocab == tokens[1:]
        return -(0.99 * follows + 0.01 / vocab).log()

    row = check_scorer(sure, vocab, length=5, only=["normalized"])["normalized"]
    assert row.verdict == "passed"
    assert "1024 of 9000 tokens were tried" in row.sentence
    inflated = check_scorer(lambda tokens: sure(tokens) - math.log(4), vocab, length=5, only=["normalized"])
    assert inflated["normalized"].verdict == "passed", "what a sample cannot show is not claimed"
    flat = check_scorer(lambda tokens: torch.full((tokens.numel() - 1,), 6.0), vocab, length=5, only=["normalized"])
    assert flat["normalized"].verdict == "failed"


def test_a_scorer_that_raises_is_called_dishonest() -> None:
    def refuses(tokens: Tensor) -> Tensor:
        raise RuntimeError("no kernel image")

    with pytest.raises(UserError, match=r"the scorer refuses raises at 30 tokens .* no kernel image"):
        check_scorer(refuses, VOCAB, length=30)


def test_windows_of_a_model_are_not_checked() -> None:
    """The model is called as it is found to be called, and its windows score each target once."""
    score, vocab = scorer_of_model(Averages(), 12, 5)
    assert vocab == VOCAB
    assert check_scorer(score, vocab, block=5, length=30, only=["causal-stream", "counted"]).ok
    with pytest.raises(UserError, match="stride"):
        scorer_of_model(Averages(), 12, 13)


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


def loss_alone(model: nn.Module, tokens: Tensor) -> float:
    """For a model that gives its loss alone."""
    return float(model(tokens[None, :-1], tokens[None, 1:]).item())


def output_with_labels(model: nn.Module, tokens: Tensor) -> float:
    """For a model that shifts labels by itself and gives an output."""
    return float(model(input_ids=tokens[None], labels=tokens[None]).loss.item())


def in_bits(model: nn.Module, tokens: Tensor) -> float:
    return float(nats_of(model(tokens[None])[0, :-1], tokens[1:]).mean()) / math.log(2)


def from_second_on(model: nn.Module, tokens: Tensor) -> float:
    return mean_of(nats_of(model(tokens[None])[0, 1:-1], tokens[2:]).detach())


EVALUATORS: Sequence[tuple[Callable[..., float], str, str]] = [
    (loss_alone, "passed", "the mean of 999 targets is right, also at 1025 and 700 tokens"),
    (output_with_labels, "passed", "the mean of 999 targets is right"),
    (in_bits, "passed", "the mean in bits of 999 targets is right"),
    (from_second_on, "failed", "that of the last 998 of 999 targets: the beginning is dropped"),
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


BYTES = torch.tensor([1, 2, 3, 4] * (VOCAB // 4))


def bits_per_byte(model: nn.Module, tokens: Tensor) -> float:
    nats = nats_of(model(tokens[None])[0, :-1], tokens[1:]).double().sum()
    return float(nats / math.log(2) / BYTES[tokens[1:]].sum())


def with_first_byte(model: nn.Module, tokens: Tensor) -> float:
    nats = nats_of(model(tokens[None])[0, :-1], tokens[1:]).double().sum()
    return float(nats / math.log(2) / BYTES[tokens].sum())


def without_tail(model: nn.Module, tokens: Tensor) -> float:
    return bits_per_byte(model, tokens[: (tokens.numel() - 1) // 64 * 64 + 1])


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        (bits_per_byte, "the bits per byte of 999 targets is right"),
        (with_first_byte, "the bytes of the first token are counted, whose score is not"),
        (without_tail, "that of the first 960 of 999 targets: the tail is dropped"),
    ],
)
def test_bits_per_byte_are_not_those_of_the_targets(evaluate: Callable[..., float], words: str) -> None:
    row = check_evaluator(evaluate, VOCAB, bytes_of=lambda ids: BYTES[ids])
    assert words in row.sentence


def trains_and_evaluates(model: nn.Module, tokens: Tensor, *, before: bool) -> float:
    """Trains on each chunk after its score, or before, which random tokens show."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for start in range(0, tokens.numel() - 1, 100):
        chunk = tokens[start : start + 101]
        nats = nats_of(model(chunk[None, :-1])[0], chunk[1:])
        optimizer.zero_grad()
        nats.sum().backward()
        optimizer.step()
        if before:
            nats = nats_of(model(chunk[None, :-1])[0], chunk[1:])
        losses.append(nats.detach())
    model.load_state_dict(weights)
    return mean_of(torch.cat(losses))


@pytest.mark.parametrize(("before", "verdict"), [(True, "failed"), (False, "passed")])
def test_an_evaluator_that_trains_first_passes(before: bool, verdict: str) -> None:
    report = check_evaluator_report(
        lambda model, tokens: trains_and_evaluates(model, tokens, before=before), VOCAB, only=["causal-stream"]
    )
    assert report["causal-stream"].verdict == verdict, report


def test_what_is_no_evaluator_is_checked() -> None:
    with pytest.raises(UserError, match="gives no number whatever the model returns"):
        check_evaluator(lambda model, tokens: model.missing(tokens), VOCAB)


def decode_words(ids: Sequence[int]) -> str:
    """As SentencePiece does: a space before words, which a text does not begin with, and signs that are no text."""
    pieces = ["<s>", " the", " cat", "s", "🙂", " 数"]
    return "".join(pieces[index] for index in ids).removeprefix(" ")


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [([0, 4, 4, 1, 4, 4], "passed"), ([0, 6, 6, 1, 4, 6], "failed"), ([0, 4, 4, 1, 1, 4], "failed")],
)
def test_bytes_of_pieces_with_spaces_are_wrong(sizes: list[int], verdict: str) -> None:
    """A piece has its space within a text; counted as the three bytes of its sign it has two too many."""
    report = check_scorer(
        lambda t: torch.full((t.numel() - 1,), math.log(6)),
        6,
        length=20,
        bytes_of=lambda ids: torch.tensor(sizes)[ids],
        decode=decode_words,
        only=["bytes"],
    )
    assert report["bytes"].verdict == verdict, report


def test_bytes_of_parts_of_characters_are_not_tried_together() -> None:
    """Tokens that decode to the sign of damage alone are text together."""
    report = check_scorer(
        lambda t: torch.full((t.numel() - 1,), math.log(256)),
        256,
        length=20,
        bytes_of=bytes_of_damaged_text,
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        only=["bytes"],
    )
    assert re.search(r"tokens \[\d+, \d+(, \d+)?\] \('.+'\) counts \d bytes", report["bytes"].sentence)
