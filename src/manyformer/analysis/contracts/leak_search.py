"""Find the place of a broken contract: the smallest input that shows it, then the submodule in which it enters.

Everything here is tried on short sequences first, in the dtype that separates a leak from rounding. What cannot be
found is left out and said; nothing that is raised here changes a verdict.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.analysis.contracts.isolation import in_dtype
from manyformer.analysis.contracts.leak_place import DependenceMatrix, LeakKind, LeakPlace
from manyformer.analysis.contracts.module_trace import (
    Culprit,
    ModuleTrace,
    PartComparison,
    Run,
    RunPart,
    Statement,
    TooLarge,
    find_statement,
    names_of,
    same_class,
    sizes_of,
)
from manyformer.analysis.contracts.subject import FLOAT32_TOLERANCE, Untestable
from manyformer.analysis.contracts.token_exchange import (
    Exchange,
    ExchangeTest,
    Forward,
    Leak,
    measure_leaks,
    training_forward,
)
from manyformer.analysis.contracts.trial import (
    FLOAT64_TOLERANCE,
    Contract,
    ContractTrial,
    RowItem,
    pack_documents,
    pad_documents,
)
from manyformer.nn.model_inputs import Inputs

MAX_SECONDS = 20.0
"""The time that one search may take; what is found by then is told."""

SHORT_LENGTHS = (2, 4, 8, 16, 32)
"""Lengths at which every token is exchanged in search of a short sequence, which is then shortened further."""

TRACED_LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
"""Lengths that are rarely sizes of other axes."""

PICTURE_SIZE = 32
"""The largest number of rows and columns of a matrix."""

EXACT_TOLERANCE = 1e-7
"""The largest change that is rounding where the same operators run on equal shapes in float32."""

OTHER_ROWS = (2, 3, 5, 7)

LATER = frozenset({"causal", "causal-gradient", "causal-training", "causal-autocast"})
CACHED = frozenset({"cached", "prefill", "decode", "preallocated"})


class OutOfTime(Exception):
    """Raised if a search took as long as it may."""


class Pair(NamedTuple):
    """Two runs whose outputs should agree within their parts."""

    first: Run
    second: Run

    def change(self) -> Tensor:
        """How far the outputs differ at each compared position. Raises ValueError if they cannot be compared."""
        first = self.first.part.cut(self.first.call())
        self.second.prepare()
        second = self.second.part.cut(self.second.call())
        if first is None or second is None or first.shape != second.shape:
            raise ValueError("the outputs of the two runs have no common part")
        return (first - second).abs().flatten(0, -3).amax((0, -1)).cpu()


@final
class PlaceFinder:
    """Finds the places of broken contracts of one check; contracts that show the same fault share its place."""

    def __init__(self) -> None:
        self._places: dict[tuple[LeakKind, bool], LeakPlace | None] = {}

    def find(self, contract: Contract, trial: ContractTrial, evidence: object = None) -> LeakPlace | None:
        """The place of a contract that failed; None if it has none, or if nothing was found.

        `evidence` is what its finding has: the leak that it measured, if it exchanged tokens.
        """
        name = contract.name
        kind = kind_of(name)
        if kind is None:
            return None
        key = (kind, name.endswith("training"))
        if kind in ("cache", "padding") or name == "causal-autocast":
            return self._search(kind, name, trial, evidence)
        if key not in self._places:
            self._places[key] = self._search(kind, name, trial, evidence)
        return self._places[key]

    def _search(self, kind: LeakKind, name: str, trial: ContractTrial, evidence: object) -> LeakPlace | None:
        try:
            return _LeakSearch(kind, name, trial, evidence).find()
        # a place is an addition: the contract has its verdict, whatever a model raises here
        except Exception:
            return None


def kind_of(contract: str) -> LeakKind | None:
    """What an output depends on if this contract is broken; None for contracts without a place."""
    kinds: dict[str, LeakKind] = {
        "length": "length",
        "targets": "targets",
        "packing": "packing",
        "seed": "random numbers",
    }
    kinds |= dict.fromkeys(LATER, "later tokens")
    kinds |= dict.fromkeys(("batch", "batch-training"), "other rows")
    kinds |= dict.fromkeys(CACHED, "cache")
    kinds |= dict.fromkeys(("padding-right", "padding-left"), "padding")
    return kinds.get(contract)


class _Found(NamedTuple):
    """What the search of one kind found: the pair that shows it, and the fields of the place that follow from it."""

    pair: Pair
    fields: dict[str, Any]


class _LeakSearch:
    def __init__(self, kind: LeakKind, contract: str, trial: ContractTrial, evidence: object) -> None:
        self.kind = kind
        self.contract = contract
        self.training = contract.endswith("training")
        self.trial = trial
        self.evidence = evidence if isinstance(evidence, Leak) and evidence.exchange is not None else None
        self.subject = trial.subject
        self.deadline = time.monotonic() + MAX_SECONDS
        self.notes: list[str] = []
        self.scale = 0.0
        self.dtype: torch.dtype | None = None

    def find(self) -> LeakPlace | None:
        for dtype in self._dtypes():
            self.dtype = dtype
            try:
                with in_dtype(self.subject.module, dtype), self._modes() as forward:
                    return self._find(forward)
            # some models compute in float32 alone; others promise nothing about a second call in training
            except (RuntimeError, TypeError, ValueError, Untestable):
                if dtype is None:
                    raise
        return None

    def _dtypes(self) -> tuple[torch.dtype | None, ...]:
        on_cpu = self.subject.token_ids.device.type == "cpu"
        if self.contract == "causal-autocast" or self.subject.module is None or not on_cpu:
            return (None,)
        return (torch.float64, None)

    @contextmanager
    def _modes(self) -> Iterator[Forward]:
        """The contexts in which the contract failed, with a forward pass that stops when there is no time left."""
        with self._mode() as forward:

            def timed(inputs: Inputs) -> Tensor:
                if time.monotonic() > self.deadline:
                    raise OutOfTime
                logits = forward(inputs)
                self.scale = max(self.scale, float(torch.nan_to_num(logits).abs().max()))
                return logits

            yield timed

    def _mode(self) -> AbstractContextManager[Forward]:
        subject = self.subject

        def in_evaluation(inputs: Inputs) -> Tensor:
            return subject(inputs).logits

        def in_autocast(inputs: Inputs) -> Tensor:
            with torch.autocast(subject.token_ids.device.type, torch.bfloat16):
                return subject(inputs).logits

        if self.training:
            rows = 1 if self.kind == "later tokens" else 2
            both = [self.trial.draw(rows, self.trial.length) for _ in range(2)]
            return training_forward(self.trial, *both, after_step=False)
        return nullcontext(in_autocast if self.contract == "causal-autocast" else in_evaluation)

    def _find(self, forward: Forward) -> LeakPlace | None:
        searches: dict[LeakKind, Callable[[Forward], _Found | None]] = {
            "later tokens": self._find_later,
            "length": self._find_length,
            "other rows": self._find_rows,
            "targets": self._find_targets,
            "cache": self._find_cache,
            "padding": self._find_padding,
            "packing": self._find_packing,
            "random numbers": self._find_random,
        }
        try:
            found = searches[self.kind](forward)
        except OutOfTime:
            return None
        if found is None:
            return None
        fields = found.fields | {"kind": self.kind, "training": self.training}
        fields |= self._find_module(found.pair)
        return LeakPlace(**fields, notes=tuple(self.notes))

    @property
    def allowed(self) -> float:
        """The largest change that is rounding."""
        if self.dtype == torch.float64:
            return FLOAT64_TOLERANCE * self.scale
        # runs of equal shapes round equally
        if self.kind == "later tokens":
            return EXACT_TOLERANCE * self.scale
        return FLOAT32_TOLERANCE * self.scale

    def _lengths(self, lengths: Sequence[int], limit: int | None = None) -> list[int]:
        """Those of the lengths that the subject takes, rounded up to its multiples, each once."""
        multiple = self.subject.length_multiple
        limit = limit or self.subject.max_length
        rounded = dict.fromkeys(-(-length // multiple) * multiple for length in lengths)
        return [length for length in rounded if limit is None or length <= limit]

    # -- later tokens

    def _find_later(self, forward: Forward) -> _Found | None:
        leak = self._shortest_leak(forward)
        if leak is None or leak.exchange is None:
            return None
        leak = self._shortened(forward, leak)
        assert leak.exchange is not None
        fields: dict[str, Any] = {
            "output": leak.first_output,
            "token": leak.exchange.start,
            "size": leak.size,
            "relative_size": leak.size / leak.scale if leak.scale else None,
            "length": leak.inputs.tokens.shape[1],
            "tokens": _rows(leak.inputs.tokens),
            "exchanged": _rows(leak.exchanged_inputs().tokens),
        }
        try:
            fields["matrix"] = self._matrix(forward, leak)
            leak = self._traceable(forward, leak)
        except OutOfTime:
            self.notes.append("the matrix was left out, as it would have taken too long")
        return _Found(self._later_pair(forward, leak), fields)

    def _shortest_leak(self, forward: Forward) -> Leak | None:
        """A leak in a short sequence, or the one that the contract found, or one in a long sequence."""
        long_length = self.trial.long_length
        for length in self._lengths(SHORT_LENGTHS):
            leak = self._leak_at(forward, length)
            if leak is not None:
                return leak
        if self.evidence is not None and self.evidence.exchange is not None:
            leak = self._leaks(forward, self.evidence.inputs, self.evidence.exchange)
            if leak is not None:
                return leak
        for length in self._lengths((64, 128, 256, long_length), long_length):
            leak = self._leak_at(forward, length)
            if leak is not None:
                return leak
        return None

    def _leak_at(self, forward: Forward, length: int) -> Leak | None:
        """A leak at this length: of a single token, or of all from a position on; None if the model refuses it."""
        inputs = self._inputs(1, length)
        singles = [self._exchange(inputs, start, start + 1) for start in range(1, length)]
        suffixes = [self._exchange(inputs, start, length) for start in range(1, length - 1, max(length // 16, 1))]
        try:
            for exchanges in filter(None, (singles, suffixes)):
                leak = measure_leaks(forward, [ExchangeTest(inputs, exchanges)], tolerance=self._tolerance())
                if leak.exchange is not None:
                    return leak
        except OutOfTime:
            raise
        # models raise whatever they like at a length that they do not take
        except Exception:
            return None
        return None

    def _tolerance(self) -> float | None:
        """Relative to the logits; None is the usual one of their dtype."""
        return None if self.dtype == torch.float64 else EXACT_TOLERANCE

    def _inputs(self, rows: int, length: int) -> Inputs:
        return self.trial.draw(rows, length, source=min(length, self.trial.length))

    def _exchange(self, inputs: Inputs, start: int, stop: int) -> Exchange:
        return Exchange(start, stop, self.trial.different_tokens(inputs.tokens[:, start:stop])[0])

    def _leaks(self, forward: Forward, inputs: Inputs, exchange: Exchange) -> Leak | None:
        """The leak of one exchange, or None; None too if the model does not take this length."""
        if not 0 < exchange.start < exchange.stop <= inputs.tokens.shape[1]:
            return None
        try:
            leak = measure_leaks(forward, [ExchangeTest(inputs, [exchange])], tolerance=self._tolerance())
        except OutOfTime:
            raise
        except Exception:
            return None
        return leak if leak.exchange is not None else None

    def _shortened(self, forward: Forward, leak: Leak) -> Leak:
        """The same leak in fewer tokens, and with fewer of them exchanged, by halving."""
        try:
            leak = self._with_fewer_exchanged(forward, leak)
            leak = self._with_fewer_tokens(forward, leak)
            # tokens before the one that is seen too early leak through it: the last of the shortest input is that one
            length = leak.inputs.tokens.shape[1]
            leak = self._leaks(forward, leak.inputs, self._exchange(leak.inputs, length - 1, length)) or leak
        except OutOfTime:
            self.notes.append("a shorter input may exist, the search took too long")
        return leak

    def _with_fewer_exchanged(self, forward: Forward, leak: Leak) -> Leak:
        assert leak.exchange is not None
        while (size := leak.exchange.stop - leak.exchange.start) > 1:
            start, stop, new_tokens = leak.exchange
            middle = start + size // 2
            halves = (
                Exchange(start, middle, new_tokens[: middle - start]),
                Exchange(middle, stop, new_tokens[middle - start :]),
            )
            found = [half for half in (self._leaks(forward, leak.inputs, half) for half in halves) if half is not None]
            if not found:
                break
            leak = found[0]
            assert leak.exchange is not None
        return leak

    def _with_fewer_tokens(self, forward: Forward, leak: Leak) -> Leak:
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
                shorter = self._leaks(forward, inputs, exchange) if length > removed else None
                if shorter is None:
                    removed = removed // 2 // multiple * multiple
                else:
                    leak = shorter
        return leak

    def _traceable(self, forward: Forward, leak: Leak) -> Leak:
        """The same leak at a length that is no size of another axis, if it is still there with more tokens."""
        assert leak.exchange is not None
        shortest = leak.inputs.tokens.shape[1]
        sizes = sizes_of(self.subject.module)
        lengths = [*TRACED_LENGTHS, *range(shortest, shortest + 9 * self.subject.length_multiple)]
        tried = 0
        for length in self._lengths([length for length in lengths if length >= max(shortest, 7)]):
            if length in sizes or tried == 6:
                continue
            tried += 1
            more = self._inputs(1, length)
            tokens = torch.cat([leak.inputs.tokens, more.tokens[:, shortest:]], dim=1)
            longer = self._leaks(forward, more._replace(tokens=tokens), leak.exchange)
            if longer is not None:
                return longer
        return leak

    def _later_pair(self, forward: Forward, leak: Leak) -> Pair:
        assert leak.exchange is not None
        part = RunPart(1, leak.inputs.tokens.shape[1], 0, 0, leak.exchange.start)
        exchanged = leak.exchanged_inputs()
        return Pair(Run(lambda: forward(leak.inputs), part), Run(lambda: forward(exchanged), part))

    def _matrix(self, forward: Forward, leak: Leak) -> DependenceMatrix | None:
        """Which outputs change with which tokens, at a length that shows the leak and some of its surroundings."""
        assert leak.exchange is not None
        shortest = leak.inputs.tokens.shape[1]
        lengths = self._lengths([length for length in (12, 24, PICTURE_SIZE) if length >= shortest + 4] + [shortest])
        # both ends of the leak, or, where they are far apart, all of the sequence in bins
        bin_size = 1 if leak.exchange.start - leak.first_output < PICTURE_SIZE - 4 else -(-shortest // PICTURE_SIZE)
        for length in lengths:
            first = max(min(leak.first_output - 4, length - PICTURE_SIZE), 0) if bin_size == 1 else 0
            starts = range(first, min(length, first + PICTURE_SIZE * bin_size), bin_size)
            matrix = self._measure_matrix(forward, length, starts)
            if matrix.leaks:
                return matrix
        return None

    def _measure_matrix(self, forward: Forward, length: int, starts: range) -> DependenceMatrix:
        inputs = self._inputs(1, length)
        bin_size = starts.step
        changed = torch.zeros(len(starts), len(starts), dtype=torch.bool)
        # a second draw of other tokens: a discrete choice may be the same for the first
        for _ in range(2):
            exchanges = [self._exchange(inputs, start, min(start + bin_size, length)) for start in starts]
            beyond = ~(self._changes(forward, inputs, exchanges) <= self.allowed)
            for token in range(len(starts)):
                for output, start in enumerate(starts):
                    changed[output, token] |= bool(beyond[token, start : start + bin_size].any())
        return DependenceMatrix(tuple(tuple(row) for row in changed.tolist()), starts.start, bin_size)

    def _changes(self, forward: Forward, inputs: Inputs, exchanges: Sequence[Exchange]) -> Tensor:
        """How far each output changes (exchanges, tokens): in one batch, or one by one if rows change each other."""
        rows = inputs.rows([0] * len(exchanges))
        tokens = rows.tokens.clone()
        for row, exchange in enumerate(exchanges):
            tokens[row, exchange.start : exchange.stop] = exchange.new_tokens
        alone = tokens.clone()
        alone[1:] = rows.tokens[1:]
        expected = forward(rows)
        unchanged = (forward(rows._replace(tokens=alone)) - expected).abs()[1:]
        if not unchanged.numel() or float(unchanged.max()) <= self.allowed:
            return (forward(rows._replace(tokens=tokens)) - expected).abs().amax(-1).cpu()
        expected = forward(inputs)
        changes = [(forward(inputs._replace(tokens=row[None])) - expected).abs().amax(-1)[0] for row in tokens]
        return torch.stack(changes).cpu()

    # -- other kinds

    def _found(self, pair: Pair, **fields: Any) -> _Found | None:
        """What a pair shows, or None if its outputs agree."""
        change = pair.change()
        beyond = (~(change <= self.allowed)).nonzero()
        if not len(beyond):
            return None
        size = float(change.max())
        position = int(beyond[0]) + pair.first.part.start
        relative_size = size / self.scale if self.scale else None
        return _Found(pair, {"output": position, "size": size, "relative_size": relative_size, **fields})

    def _first_that_shows(self, pairs: Iterator[tuple[Pair, dict[str, Any]]]) -> _Found | None:
        """The first pair that shows a difference, and in its place a later one whose length is no size of an axis."""
        sizes = sizes_of(self.subject.module)
        smallest: _Found | None = None
        tried = 0
        for pair, fields in pairs:
            try:
                found = self._found(pair, **fields)
            except OutOfTime:
                break
            # a length that the model does not take
            except Exception:
                continue
            if found is None:
                continue
            smallest = smallest or found
            tried += 1
            part = pair.first.part
            if tried > 8 or (not (sizes & {part.length, part.rows} - {1}) and part.length > 6):
                return found._replace(fields=smallest.fields)
        return smallest

    def _find_length(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            for length in self._lengths((2, 4, 8, *TRACED_LENGTHS, self.trial.long_length)):
                inputs = self._inputs(1, length)
                for size in dict.fromkeys(self._lengths((length - 1, length // 2, 1))):
                    if 0 < size < length:
                        yield self._length_pair(forward, inputs, size), {"length": length, "token": size}

        return self._first_that_shows(pairs())

    def _length_pair(self, forward: Forward, inputs: Inputs, size: int) -> Pair:
        beginning = inputs.columns(0, size)
        whole = Run(lambda: forward(inputs), RunPart(1, inputs.tokens.shape[1], 0, 0, size))
        return Pair(whole, Run(lambda: forward(beginning), RunPart(1, size, 0, 0, size)))

    def _find_rows(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            lengths = (1, 2, 4, 8, *TRACED_LENGTHS[:4], self.trial.length)
            for rows in OTHER_ROWS:
                for length in self._lengths(lengths):
                    yield from self._row_pairs(forward, self.trial.draw(2 * rows, length), rows, length)

        return self._first_that_shows(pairs())

    def _row_pairs(
        self, forward: Forward, both: Inputs, rows: int, length: int
    ) -> Iterator[tuple[Pair, dict[str, Any]]]:
        """The other rows exchanged, one of a row's tokens all over them, and, in evaluation, no other rows at all."""
        inputs = both.rows(range(rows))
        for row in (rows - 1, 0):
            part = RunPart(rows, length, row, 0, length)
            batch = Run(lambda: forward(inputs), part)
            exchanged = both.rows([index if index == row else index + rows for index in range(rows)])
            crowded = inputs.tokens[row, :1].expand_as(inputs.tokens).clone()
            crowded[row] = inputs.tokens[row]
            for other in (exchanged, inputs._replace(tokens=crowded)):
                fields = {"tokens": _rows(inputs.tokens), "exchanged": _rows(other.tokens)}
                other_batch = Run(partial(forward, other), part)
                yield Pair(batch, other_batch), {**fields, "row": row, "length": length}
            if not self.training:
                alone = Run(partial(forward, inputs.rows([row])), RunPart(1, length, 0, 0, length))
                yield Pair(batch, alone), {"row": row, "length": length, "tokens": _rows(inputs.tokens)}

    def _find_targets(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            for length in self._lengths((2, 4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                inputs = self._inputs(1, length)
                first = self.trial.tokens(1, length)
                second = self.trial.different_tokens(first)
                part = RunPart(1, length, 0, 0, length)

                def run(targets: Tensor, inputs: Inputs = inputs) -> Tensor:
                    logits = self.subject.logits_with_targets(inputs, targets)  # type: ignore[attr-defined]
                    self.scale = max(self.scale, float(logits.abs().max()))
                    return logits  # type: ignore[no-any-return]

                pair = Pair(Run(partial(run, first), part), Run(partial(run, second), part))
                yield pair, {"length": length, "tokens": _rows(first), "exchanged": _rows(second)}

        return self._first_that_shows(pairs())

    def _find_cache(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            lengths = self._lengths((2, 3, 4, 6, 8, *TRACED_LENGTHS[:6], self.trial.length))
            # several rows, if one does not show it: the states of rows may be confused
            for rows, length in itertools.product((1, 3, 5), lengths):
                inputs = self._inputs(rows, length)
                for sizes in self._chunks(length):
                    start = self._first_wrong_chunk(forward, inputs, sizes)
                    if start is not None:
                        fields = {"length": length, "token": start, "tokens": _rows(inputs.tokens)}
                        yield self._step_pair(forward, inputs, sizes, start), fields

        return self._first_that_shows(pairs())

    def _chunks(self, length: int) -> list[list[int]]:
        if self.contract in ("cached", "decode"):
            return [[1] * length]
        half = max(length // 2, 1)
        third = max(length // 3, 1)
        return [[half, *[1] * (length - half)], [half, length - half], [third] * (length // third)]

    def _first_wrong_chunk(self, forward: Forward, inputs: Inputs, sizes: list[int]) -> int | None:
        """Where the first chunk begins whose outputs differ from those of one pass; None if there is none."""
        row = inputs.tokens.shape[0] // 2
        try:
            expected = forward(inputs)[row]
            actual = self.trial.run_in_chunks(inputs, sizes)[0][row]
        except OutOfTime:
            raise
        # a length that the model does not take
        except Exception:
            return None
        beyond = (~((actual - expected).abs().amax(-1) <= self.allowed)).nonzero()
        if not len(beyond):
            return None
        starts = list(itertools.accumulate(sizes, initial=0))
        return max(start for start in starts if start <= int(beyond[0]))

    def _step_pair(self, forward: Forward, inputs: Inputs, sizes: list[int], start: int) -> Pair:
        """One pass over all tokens, and the chunk that begins at `start`, from the state after those before."""
        rows, length = inputs.tokens.shape
        row = rows // 2
        size = sizes[list(itertools.accumulate(sizes, initial=0)).index(start)]
        states: list[Any] = []

        def prepare() -> None:
            state = self.subject.init_state(inputs)
            done = 0
            for earlier in sizes:
                if done == start:
                    break
                state = self.subject(inputs.columns(done, done + earlier), state).state
                done += earlier
            states[:] = [state]

        def step() -> Tensor:
            return self.subject(inputs.columns(start, start + size), states[0]).logits

        whole = Run(lambda: forward(inputs), RunPart(rows, length, row, start, start + size))
        return Pair(whole, Run(step, RunPart(rows, size, row, 0, size), prepare))

    def _find_padding(self, forward: Forward) -> _Found | None:
        side = "left" if self.contract.endswith("left") else "right"

        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            for length in self._lengths((4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                documents = self.trial.documents([length, max(length * 2 // 3, 1)])
                padded, slots = pad_documents(self.trial, documents, side)  # type: ignore[arg-type]
                slot = slots[1]
                size = slot.stop - slot.start
                rows, width = padded.tokens.shape
                batch = Run(partial(forward, padded), RunPart(rows, width, slot.row, slot.start, slot.stop))
                alone = Run(partial(forward, documents[1]), RunPart(1, size, 0, 0, size))
                yield (
                    Pair(batch, alone),
                    {"row": slot.row, "length": padded.tokens.shape[1], "tokens": _rows(padded.tokens)},
                )

        return self._first_that_shows(pairs())

    def _find_packing(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            for length in self._lengths((4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                documents = self.trial.documents([length, max(length * 2 // 3, 1)])
                packed, slots = pack_documents(self.trial, documents, [[RowItem(0), RowItem(1)]])
                slot = slots[1]
                size = slot.stop - slot.start
                width = packed.tokens.shape[1]
                together = Run(partial(forward, packed), RunPart(1, width, 0, slot.start, slot.stop))
                alone = Run(partial(forward, documents[1]), RunPart(1, size, 0, 0, size))
                yield Pair(together, alone), {"length": width, "tokens": _rows(packed.tokens)}

        return self._first_that_shows(pairs())

    def _find_random(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            for length in self._lengths((2, 4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                inputs = self._inputs(1, length)
                part = RunPart(1, length, 0, 0, length)

                def run(seed: int, inputs: Inputs = inputs) -> Tensor:
                    usual_seed = self.subject.seed
                    self.subject.seed = seed
                    try:
                        return forward(inputs)
                    finally:
                        self.subject.seed = usual_seed

                first, second = (Run(partial(run, self.subject.seed + step), part) for step in range(2))
                yield Pair(first, second), {"length": length, "tokens": _rows(inputs.tokens)}

        return self._first_that_shows(pairs())

    # -- the submodule

    def _find_module(self, pair: Pair) -> dict[str, Any]:
        module = self.subject.module
        if module is None:
            self.notes.append("an adapter without `module` does not say which submodules there are")
            return {}
        culprits: list[Culprit] = []
        for tolerance in self._trace_tolerances():
            comparison = PartComparison(
                pair.first.part, pair.second.part, tolerance, floating_only=self.kind == "targets"
            )
            try:
                trace = ModuleTrace(module, comparison)
                trace.compare(*pair)
            except OutOfTime:
                self.notes.append("the submodule was not looked for, as the search took too long")
                return {}
            except TooLarge:
                self.notes.append("the submodule was not looked for: the outputs of all of them are too large")
                return {}
            culprits = trace.culprits
            if culprits:
                break
        if not culprits:
            self.notes.append("no submodule gives other outputs for equal inputs")
            return {}
        first = culprits[0]
        statement = self._find_statement(pair, first, comparison)
        fields: dict[str, Any] = {
            "module": first.key.module,
            "module_class": type(first.module).__name__,
            "after": first.after,
            "before": first.before,
            "layers": names_of(culprits, type(first.module)),
            "layer_count": same_class(module, first.module),
        }
        if not trace.judges_later_calls:
            self.notes.append("later modules were not judged")
        if statement is not None:
            fields |= statement._asdict()
        return fields

    def _trace_tolerances(self) -> tuple[float, ...]:
        if self.dtype == torch.float64:
            return (1e-10, 0.0)
        return (1e-5, 1e-7, 0.0)

    def _find_statement(self, pair: Pair, culprit: Culprit, comparison: PartComparison) -> Statement | None:
        assert self.subject.module is not None
        try:
            return find_statement(self.subject.module, culprit, comparison, *pair)
        # the place is worth telling without its line
        except Exception:
            return None


def _rows(tokens: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in tokens.tolist())
