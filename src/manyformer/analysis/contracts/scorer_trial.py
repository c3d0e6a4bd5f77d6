"""A scorer under test: streams that differ in chosen tokens, the nats that it gives for them, and what they show.

The length of the streams stays the same, because windows that are aligned to the end of a stream give earlier tokens
another context in a longer one.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.analysis.contracts.check_report import ContractRow
from manyformer.analysis.contracts.scorer_state import FileWatch, HeldState

Scorer = Callable[[Tensor], Tensor]
"""Gives the nats (n - 1) of the tokens 1 to n - 1 of a stream (n), each time from a fresh state."""

TOLERANCE = 1e-4
"""The largest change of a token's nats, relative to the usual ones, that counts as rounding in float32."""

LOW_PRECISION = 2e-2
"""The same between equal calls of a scorer in bfloat16 whose sums have no fixed order."""

SUM_TOLERANCE = 2e-3
"""How far the probabilities of a position may sum above 1: rounding of as many float32 numbers as there are tokens."""

SUMMED_POSITIONS = 6
SUMMED_TOKENS = 1024
"""So many tokens are tried at each of these positions; of a larger vocabulary a sample."""

SUM_CALLS = 4096
"""So many calls are made for sums in a small vocabulary, at more positions."""

MAX_EXCHANGES = 400
"""So many cuts are tried: every token of a shorter stream, and of others of its length."""

MAX_SCANS = 128
LEAST_CALLS = 150
"""So many calls are made however long they take."""

LONGER = 1000
"""Tokens of one more stream, for what begins to read ahead only after many: where no length is given."""

LONGER_CUTS = 24
LONGER_POSITIONS = 2

SCANNED_SHARE = 0.25
SCAN_CAP = 8.0
"""A probability times the size of the vocabulary counts up to this value: a rare large one must not decide."""

FALSE_ALARM = 1e-12
"""The probability at which random tokens would make an honest scorer look like a cheat, for each set of positions."""


@final
@dataclass(frozen=True)
class ScorerOptions:
    """What is known about a scorer beside its function.

    `block` is the size at which it cuts a stream (window, stride or chunk): leaks are looked for around its borders.
    `bytes_of(ids)` gives the number of bytes of tokens, `decode(ids)` their text or bytes, `encode(text)` tokens. `bos`
    is the token that begins a document, if the scorer promises that documents are independent. `partitions` are
    keywords that must not change a score, such as sizes of batches. `seconds` is about how long the check may take; a
    slow scorer is called less often, and the report tells what was not looked at.
    """

    vocab: int
    length: int | None = None
    block: int | None = None
    bytes_of: Callable[[Tensor], Any] | None = None
    decode: Callable[[Sequence[int]], str | bytes] | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    bos: int | None = None
    partitions: Sequence[Mapping[str, Any]] = ()
    seed: int = 0
    seconds: float = 120.0

    @property
    def stream_length(self) -> int:
        """Tokens of the streams that are tried: a few blocks and a rest, so that the last one is not full."""
        if self.length is not None:
            return self.length
        if self.block is not None:
            return 3 * self.block + self.block // 3 + 2
        return 200


class ScoreFault(ValueError):
    """A scorer gives what cannot be scores: the contract that this breaks, and a sentence."""

    def __init__(self, contract: str, sentence: str) -> None:
        super().__init__(sentence)
        self.row = ContractRow(contract, "failed", sentence)


class ScoreLeak(NamedTuple):
    """Scores of earlier tokens that changed when the token `cut`, or all from it on, did."""

    cut: int
    changed: Tensor
    change: float


class PositionSum(NamedTuple):
    """The probabilities that tokens have at one position of a stream.

    `total` is the sum over those that were tried, `estimate` one over the vocabulary in which no token counts more
    than `SCAN_CAP` average ones. `rounding` bounds what rounding to few bits adds.
    """

    position: int
    total: float
    estimate: float
    tried: int
    rounding: float
    is_constant: bool


class ScorerTrial:
    """A scorer, its options, and streams drawn from one generator."""

    def __init__(self, score: Callable[..., Any], options: ScorerOptions) -> None:
        self.function = score
        self.options = options
        self.generator = torch.Generator().manual_seed(options.seed)
        # before the first call, which may be the one that changes something
        self.held = HeldState(score)
        self.files = FileWatch()
        self.worst_change = 0.0
        self.leak: ScoreLeak | None = None
        self.tokens = self.phrases(options.stream_length)
        self.others = self.random_tokens(options.stream_length)
        self.expected = self.score(self.tokens)
        finite = self.expected[self.expected.isfinite()]
        self.scale = max(float(finite.abs().median()), 1e-3) if finite.numel() else 1.0
        # of equal calls; larger than rounding in float32 only where bits are few and sums have no order
        self.noise = 0.0
        started = time.perf_counter()
        self.repeated = [self.score(self.tokens) for _ in range(2)]
        self.seconds_per_call = (time.perf_counter() - started) / 2

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, 3 * self.noise)

    @property
    def allowed_calls(self) -> int:
        """Calls for which there is time."""
        return max(LEAST_CALLS, int(self.options.seconds / max(self.seconds_per_call, 1e-7)))

    @property
    def drawn(self) -> int:
        """The number of tokens that are drawn from: all but the one that begins documents."""
        return self.options.vocab - (self.options.bos is not None)

    def score(self, tokens: Tensor, **keywords: Any) -> Tensor:
        """The nats as float64 (n - 1). Raises ScoreFault where the scorer gives something else."""
        with self.files.watching():
            result = self.function(tokens.clone(), **keywords)
        nats = torch.as_tensor(result).detach().double().flatten().cpu()
        targets = tokens.numel() - 1
        if nats.numel() != targets:
            raise ScoreFault(
                "counted", f"{nats.numel()} scores for {tokens.numel()} tokens, of which {targets} are targets"
            )
        if nats.isnan().any():
            first = int(nats.isnan().nonzero()[0])
            count = int(nats.isnan().sum())
            raise ScoreFault(
                "counted", f"the score of token {first + 1} is not a number ({count} of {targets} are not)"
            )
        if (nats < -SUM_TOLERANCE).any():
            first = int((nats < -SUM_TOLERANCE).nonzero()[0])
            sentence = f"the score of token {first + 1} is {float(nats[first]):.4g} nats: a probability above 1"
            raise ScoreFault("normalized", sentence)
        return nats

    def random_tokens(self, count: int) -> Tensor:
        """Random tokens, without the one that begins documents."""
        tokens = torch.randint(self.drawn, (count,), generator=self.generator)
        bos = self.options.bos
        if bos is not None:
            tokens[tokens >= bos] += 1
        return tokens

    def phrases(self, count: int) -> Tensor:
        """A few random phrases again and again, with some other tokens between: what a table of n-grams knows."""
        size = max(4, min(16, count // 8))
        known = [self.random_tokens(size) for _ in range(3)]
        order = torch.randint(len(known), (count // size + 1,), generator=self.generator)
        tokens = torch.cat([known[index] for index in order.tolist()])[:count]
        replaced = torch.rand(count, generator=self.generator) < 0.15
        return torch.where(replaced, self.random_tokens(count), tokens)

    def other_tokens(self, tokens: Tensor) -> Tensor:
        """Random tokens that differ from these everywhere."""
        others = self.random_tokens(tokens.numel())
        same = others == tokens
        if self.drawn > 1:
            bos = self.options.bos
            shifted = (others + 1) % self.options.vocab
            if bos is not None:
                shifted = torch.where(shifted == bos, (shifted + 1) % self.options.vocab, shifted)
            others = torch.where(same, shifted, others)
        return others

    def compare(self, cut: int, nats: Tensor, expected: Tensor | None = None) -> None:
        """Note scores of tokens before `cut` that are not the expected ones; the first such leak is kept."""
        changes = score_changes(nats, self.expected if expected is None else expected)
        if cut > 1:
            self.worst_change = max(self.worst_change, float(changes[: cut - 1].max()) / self.scale)
        if self.leak is None:
            self.leak = self.leak_of(cut, changes)

    def leak_of(self, cut: int, changes: Tensor) -> ScoreLeak | None:
        """The scores of tokens before `cut` that changed, if any did."""
        # changes[i] is that of the score of token i + 1
        changes = changes[: cut - 1]
        changed = (changes > self.tolerance * self.scale).nonzero().flatten() + 1
        if not changed.numel():
            return None
        return ScoreLeak(cut, changed, float(changes.max()) / self.scale)

    def with_longer_stream(self) -> "ScorerTrial | None":
        """The same scorer with a longer stream; None if the length was chosen, or it is too slow or raises there."""
        if self.options.length is not None or self.options.stream_length > LONGER // 2:
            return None
        longer = copy.copy(self)
        # sums and scans are those of the stream
        for name in ("scan", "sums"):
            vars(longer).pop(name, None)
        longer.options = replace(self.options, length=LONGER)
        longer.tokens = self.phrases(LONGER)
        started = time.perf_counter()
        try:
            longer.expected = self.score(longer.tokens)
        except ScoreFault:
            raise
        except Exception:
            return None
        longer.seconds_per_call = time.perf_counter() - started
        calls = LONGER_CUTS + LONGER_POSITIONS * min(self.options.vocab, SUMMED_TOKENS)
        if longer.seconds_per_call * calls > self.options.seconds / 4:
            return None
        return longer

    def sums_at(self, positions: Sequence[int]) -> list[PositionSum]:
        """The sums of probabilities at these positions."""
        return [self._sum_at(position, min(self.options.vocab, SUMMED_TOKENS)) for position in positions]

    @property
    def exchanges(self) -> int:
        """How many cuts are tried."""
        return max(16, min(MAX_EXCHANGES, self.allowed_calls // 4))

    def cuts(self) -> list[int]:
        """Where to exchange tokens: near the borders of blocks and both ends first, and then everywhere."""
        length = self.tokens.numel()
        block = self.options.block or 64
        near = {border + offset for border in range(0, length, block) for offset in (-1, 0, 1, block // 2)}
        near |= {2, length - 2, length - 1, length // 3, length // 2}
        # from the end: how far back a late token reaches tells what kind of leak it is
        first = sorted((cut for cut in near if 2 <= cut < length), reverse=True)
        if len(first) > MAX_EXCHANGES // 4:
            # of many blocks the last ones and a few of the others
            half = MAX_EXCHANGES // 8
            first = first[:half] + first[half :: len(first) // half]
        return [*first, *(cut for cut in self.shuffled_cuts() if cut not in near)]

    def shuffled_cuts(self) -> list[int]:
        """All cuts in random order."""
        order = torch.randperm(max(self.tokens.numel() - 2, 0), generator=self.generator) + 2
        return [int(cut) for cut in order]

    @cached_property
    def scan(self) -> "Scan":
        """Streams in which a random quarter of the tokens is random, all of the vocabulary alike.

        Nobody can predict these tokens: at each, the probability that an honest scorer gives is 1 / V in the mean,
        whatever came before. The deviations of sums of such numbers are bounded, without any assumption on the model.
        """
        length = self.tokens.numel()
        weights = torch.zeros(length, dtype=torch.float64)
        counts = torch.zeros(length, dtype=torch.float64)
        for _ in range(max(8, min(MAX_SCANS, self.options.vocab, self.allowed_calls // 6))):
            is_random = torch.rand(length, generator=self.generator) < SCANNED_SHARE
            # the first token has no score
            is_random[0] = False
            tokens = torch.where(is_random, self.random_tokens(length), self.tokens)
            nats = self.score(tokens)
            changed = is_random.nonzero()
            if changed.numel():
                self.compare(int(changed[0]), nats)
            probabilities = (-nats).exp() * self.drawn
            weights[1:] += probabilities.clamp(max=SCAN_CAP) * is_random[1:]
            counts += is_random
        return Scan(weights, counts)

    @cached_property
    def sums(self) -> list[PositionSum]:
        """The sums of probabilities at a few positions; of a small vocabulary at more of them."""
        vocab = self.options.vocab
        tried = min(vocab, SUMMED_TOKENS)
        calls = self.allowed_calls // 2
        if calls < tried:
            tried = max(32, calls // 2)
        count = max(SUMMED_POSITIONS, SUM_CALLS // vocab)
        positions = self._positions()[: max(1, min(count, calls // tried))]
        return [self._sum_at(position, tried) for position in positions]

    def _positions(self) -> list[int]:
        """Positions of the stream, first those where tokens are the most probable for their number."""
        length = self.tokens.numel()
        block = self.options.block or 64
        by_scan = self.scan.means.argsort(descending=True).tolist()
        by_score = (self.expected.argsort() + 1).tolist()
        named = [1, length - 1, min(block, length - 1), min(block + 1, length - 1), length // 2 + 1]
        shuffled = (torch.randperm(length - 1, generator=self.generator) + 1).tolist()
        chosen = [
            by_scan[0],
            1,
            length - 1,
            by_score[0],
            shuffled[0],
            named[2],
            by_scan[1 % length],
            named[3],
            named[4],
        ]
        return [position for position in dict.fromkeys([*chosen, *shuffled]) if 1 <= position < length]

    def _sum_at(self, position: int, count: int) -> PositionSum:
        vocab = self.options.vocab
        # tokens of the stream are those that a table or a cache can know; the others are sampled
        known = torch.arange(0)
        candidates = torch.arange(vocab)
        if count < vocab:
            known = torch.unique(self.tokens[:position])[: count // 8]
            shuffled = torch.randperm(vocab, generator=self.generator)
            sample = shuffled[~torch.isin(shuffled, known)][: count - known.numel()]
            candidates = torch.cat([known, sample])
        nats = torch.empty(candidates.numel(), dtype=torch.float64)
        for index, token in enumerate(candidates.tolist()):
            tokens = self.tokens.clone()
            tokens[position] = token
            scores = self.score(tokens)
            self.compare(position, scores)
            nats[index] = scores[position - 1]
        probabilities = (-nats).exp()
        total = float(probabilities.sum())
        estimate = total
        if count < vocab:
            estimate = float((probabilities[known.numel() :] * vocab).clamp(max=SCAN_CAP).mean())
        rounding = float((probabilities * (_rounding(nats) + self.noise * self.scale)).nan_to_num(0.0).sum())
        is_constant = bool((nats.max() - nats.min()).abs() <= 1e-9) and nats.numel() > 2
        return PositionSum(position, total, estimate, candidates.numel(), rounding, is_constant)


def score_changes(left: Tensor, right: Tensor) -> Tensor:
    """How far apart scores are; infinite ones, of tokens that a model excludes, are equal."""
    both_infinite = left.isinf() & right.isinf()
    return torch.where(both_infinite, 0.0, (left - right).abs())


def _rounding(nats: Tensor) -> Tensor:
    """The relative error of each probability if scores, or probabilities, were rounded to 16 bits; else 0."""
    finite = nats[nats.isfinite()]
    error = torch.zeros_like(nats)
    if finite.numel() < 8 or bool((finite == finite[0]).all()):
        return error
    for dtype, step in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        if _is_on_grid(finite, dtype):
            error = torch.maximum(error, nats.abs() * step)
        elif _is_on_grid((-finite).exp(), dtype):
            error = torch.maximum(error, torch.full_like(nats, step))
    return error


def _is_on_grid(values: Tensor, dtype: torch.dtype) -> bool:
    # the logarithm of a rounded probability is in float32
    return bool(((values.to(dtype).double() - values).abs() <= 1e-6 * values.abs()).all())


class Scan:
    """Capped probabilities of random tokens, by position: the sum of each and its number."""

    def __init__(self, weights: Tensor, counts: Tensor) -> None:
        self.weights = weights
        self.counts = counts
        self.means = weights / counts.clamp(min=1)

    def violation(self) -> tuple[str, float, float] | None:
        """Where random tokens are more probable than they can be, the mean there, and what it may be at most."""
        length = self.counts.numel()
        every = torch.arange(length)
        sets: list[tuple[str, Tensor]] = [("", every > 0), (" in the second half", every >= length // 2)]
        for period in range(2, min(17, length)):
            sets += [
                (f" at every position {period} n + {offset}", every % period == offset) for offset in range(period)
            ]
        sets += [(f" at position {position}", every == position) for position in range(1, length)]
        for words, members in sets:
            count = float(self.counts[members].sum())
            if not count:
                continue
            mean = float(self.weights[members].sum()) / count
            allowed = 1 + allowed_excess(count)
            if mean > allowed:
                return words, mean, allowed
        return None


def allowed_excess(count: float) -> float:
    """How far the mean of capped numbers of mean 1 may be above 1: Freedman's bound, with the variance at most the cap.

    Solves count * s^2 = 2 log(1 / FALSE_ALARM) * SCAN_CAP * (1 + s / 3) for s.
    """
    ratio = -2 * math.log(FALSE_ALARM) * SCAN_CAP / count
    return (ratio / 3 + math.sqrt(ratio**2 / 9 + 4 * ratio)) / 2
