"""The smallest input that shows that outputs depend on later tokens, and which output depends on which token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyformer.analysis.contracts.leak_place import DependenceMatrix
from manyformer.analysis.contracts.module_trace import sizes_of
from manyformer.analysis.contracts.subject import Subject
from manyformer.analysis.contracts.token_exchange import Exchange, ExchangeTest, Forward, Leak, measure_leaks
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.nn.model_inputs import Inputs

SHORT_LENGTHS = (2, 4, 8, 16, 32)
"""Lengths at which every token is exchanged in search of a short sequence, which is then shortened further."""

TRACED_LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
"""Lengths that are rarely sizes of other axes."""

PICTURE_SIZE = 32
"""The largest number of rows and columns of a matrix."""


class OutOfTime(Exception):
    """Raised if a search took as long as it may."""


def fitting_lengths(subject: Subject, lengths: Sequence[int], limit: int | None = None) -> list[int]:
    """Those of the lengths that the subject takes, rounded up to its multiples, each once."""
    multiple = subject.length_multiple
    limit = limit or subject.max_length
    rounded = dict.fromkeys(-(-length // multiple) * multiple for length in lengths)
    return [length for length in rounded if limit is None or length <= limit]


def draw_inputs(trial: ContractTrial, rows: int, length: int) -> Inputs:
    """Random inputs; a source is at most as long as those of the contracts."""
    return trial.draw(rows, length, source=min(length, trial.length))


class LeakInput:
    """The search of the smallest input of one leak.

    `evidence` is the leak that the contract found, `tolerance` the bound of a change, relative to the logits or None
    for the usual one of their dtype, and `allowed` the same bound as a number. `notes` are what could not be done.
    """

    def __init__(
        self,
        trial: ContractTrial,
        forward: Forward,
        evidence: Leak | None,
        tolerance: float | None,
        allowed: Callable[[], float],
    ) -> None:
        self.trial = trial
        self.subject = trial.subject
        self.forward = forward
        self.evidence = evidence
        self.tolerance = tolerance
        self.allowed = allowed
        self.notes: list[str] = []

    def find(self) -> Leak | None:
        """The leak in as few tokens, with as few of them exchanged, as were found; None if there is none."""
        try:
            leak = self._any_leak()
        except OutOfTime:
            leak = self.evidence
        if leak is None or leak.exchange is None:
            return None
        return self._shortened(leak)

    def _any_leak(self) -> Leak | None:
        """A leak in a short sequence, or the one that the contract found, or one in a long sequence."""
        long_length = self.trial.long_length
        # the leak of a contract is shortened from its own length, which takes fewer calls than all exchanges
        short = SHORT_LENGTHS if self.evidence is None else SHORT_LENGTHS[:3]
        for length in fitting_lengths(self.subject, short):
            leak = self._leak_at(length)
            if leak is not None:
                return leak
        if self.evidence is not None and self.evidence.exchange is not None:
            leak = self._leaks(self.evidence.inputs, self.evidence.exchange)
            if leak is not None:
                return leak
        for length in fitting_lengths(self.subject, (*SHORT_LENGTHS[3:], 64, 128, 256, long_length), long_length):
            leak = self._leak_at(length)
            if leak is not None:
                return leak
        return None

    def _leak_at(self, length: int) -> Leak | None:
        """A leak at this length: of a single token, or of all from a position on; None if the model refuses it."""
        inputs = draw_inputs(self.trial, 1, length)
        singles = [self._exchange(inputs, start, start + 1) for start in range(1, length)]
        suffixes = [self._exchange(inputs, start, length) for start in range(1, length - 1, max(length // 16, 1))]
        try:
            for exchanges in filter(None, (singles, suffixes)):
                leak = measure_leaks(self.forward, [ExchangeTest(inputs, exchanges)], tolerance=self.tolerance)
                if leak.exchange is not None:
                    return leak
        except OutOfTime:
            raise
        # models raise whatever they like at a length that they do not take
        except Exception:
            return None
        return None

    def _exchange(self, inputs: Inputs, start: int, stop: int) -> Exchange:
        return Exchange(start, stop, self.trial.different_tokens(inputs.tokens[:, start:stop])[0])

    def _leaks(self, inputs: Inputs, exchange: Exchange) -> Leak | None:
        """The leak of one exchange, or None; None too if the model does not take this length."""
        if not 0 < exchange.start < exchange.stop <= inputs.tokens.shape[1]:
            return None
        try:
            leak = measure_leaks(self.forward, [ExchangeTest(inputs, [exchange])], tolerance=self.tolerance)
        except OutOfTime:
            raise
        except Exception:
            return None
        return leak if leak.exchange is not None else None

    def _shortened(self, leak: Leak) -> Leak:
        """The same leak in fewer tokens, and with fewer of them exchanged, by halving."""
        try:
            leak = self._with_fewer_exchanged(leak)
            leak = self._with_fewer_tokens(leak)
            # tokens before the one that is seen too early leak through it: the last of the shortest input is that one
            length = leak.inputs.tokens.shape[1]
            leak = self._leaks(leak.inputs, self._exchange(leak.inputs, length - 1, length)) or leak
        except OutOfTime:
            self.notes.append("a shorter input may exist, the search took too long")
        return leak

    def _with_fewer_exchanged(self, leak: Leak) -> Leak:
        assert leak.exchange is not None
        while (size := leak.exchange.stop - leak.exchange.start) > 1:
            start, stop, new_tokens = leak.exchange
            middle = start + size // 2
            halves = (
                Exchange(start, middle, new_tokens[: middle - start]),
                Exchange(middle, stop, new_tokens[middle - start :]),
            )
            found = [half for half in (self._leaks(leak.inputs, half) for half in halves) if half is not None]
            if not found:
                break
            leak = found[0]
            assert leak.exchange is not None
        return leak

    def _with_fewer_tokens(self, leak: Leak) -> Leak:
        multiple = self.subject.length_multiple
        for from_front in (False, True):
            removed = leak.inputs.tokens.shape[1] // 2 // multiple * multiple
            while removed >= multiple:
                length = leak.inputs.tokens.shape[1]
                exchange = leak.exchange
                assert exchange is not None
                if from_front:
                    inputs = leak.inputs.columns(removed, length)
                    exchange = Exchange(exchange.start - removed, exchange.stop - removed, exchange.new_tokens)
                else:
                    inputs = leak.inputs.columns(0, length - removed)
                shorter = self._leaks(inputs, exchange) if length > removed else None
                if shorter is None:
                    removed = removed // 2 // multiple * multiple
                else:
                    leak = shorter
        return leak

    def traceable(self, leak: Leak) -> Leak:
        """The same leak at a length that is no size of another axis, if it is still there with more tokens."""
        assert leak.exchange is not None
        shortest = leak.inputs.tokens.shape[1]
        sizes = sizes_of(self.subject.module)
        lengths = [*TRACED_LENGTHS, *range(shortest, shortest + 9 * self.subject.length_multiple)]
        tried = 0
        for length in fitting_lengths(self.subject, [length for length in lengths if length >= max(shortest, 7)]):
            if length in sizes or tried == 6:
                continue
            tried += 1
            more = draw_inputs(self.trial, 1, length)
            tokens = torch.cat([leak.inputs.tokens, more.tokens[:, shortest:]], dim=1)
            longer = self._leaks(more._replace(tokens=tokens), leak.exchange)
            if longer is not None:
                return longer
        return leak

    def matrix(self, leak: Leak) -> DependenceMatrix | None:
        """Which outputs change with which tokens, at a length that shows the leak and some of its surroundings."""
        assert leak.exchange is not None
        shortest = leak.inputs.tokens.shape[1]
        longer = [length for length in (12, 24, PICTURE_SIZE) if length >= shortest + 4]
        # both ends of the leak, or, where they are far apart, all of the sequence in bins
        bin_size = 1 if leak.exchange.start - leak.first_output < PICTURE_SIZE - 4 else -(-shortest // PICTURE_SIZE)
        for length in fitting_lengths(self.subject, [*longer, shortest]):
            first = max(min(leak.first_output - 4, length - PICTURE_SIZE), 0) if bin_size == 1 else 0
            starts = range(first, min(length, first + PICTURE_SIZE * bin_size), bin_size)
            matrix = self._measure_matrix(length, starts)
            if matrix.leaks:
                return matrix
        return None

    def _measure_matrix(self, length: int, starts: range) -> DependenceMatrix:
        inputs = draw_inputs(self.trial, 1, length)
        bin_size = starts.step
        changed = torch.zeros(len(starts), len(starts), dtype=torch.bool)
        rows = inputs.rows([0] * len(starts))
        expected = self.forward(rows)
        # a second draw of other tokens: a discrete choice may be the same for the first
        for draw in range(2):
            exchanges = [self._exchange(inputs, start, min(start + bin_size, length)) for start in starts]
            try:
                beyond = ~(self._changes(rows, expected, exchanges) <= self.allowed())
            except OutOfTime:
                if not draw:
                    raise
                break
            for token in range(len(starts)):
                for output, start in enumerate(starts):
                    changed[output, token] |= bool(beyond[token, start : start + bin_size].any())
        return DependenceMatrix(tuple(tuple(row) for row in changed.tolist()), starts.start, bin_size)

    def _changes(self, rows: Inputs, expected: Tensor, exchanges: Sequence[Exchange]) -> Tensor:
        """How far each output changes (exchanges, tokens): in one batch, or one by one if rows change each other."""
        tokens = rows.tokens.clone()
        for row, exchange in enumerate(exchanges):
            tokens[row, exchange.start : exchange.stop] = exchange.new_tokens
        alone = tokens.clone()
        alone[1:] = rows.tokens[1:]
        unchanged = (self.forward(rows._replace(tokens=alone)) - expected).abs()[1:]
        if not unchanged.numel() or float(unchanged.max()) <= self.allowed():
            return (self.forward(rows._replace(tokens=tokens)) - expected).abs().amax(-1).cpu()
        one = rows.rows([0])
        expected = self.forward(one)
        changes = [(self.forward(one._replace(tokens=row[None])) - expected).abs().amax(-1)[0] for row in tokens]
        return torch.stack(changes).cpu()
