"""Find the place of a broken contract: the smallest input that shows it, then the submodule in which it enters.

Everything here is tried on short sequences first, in the dtype that separates a leak from rounding. What cannot be
found is left out and said; nothing that is raised here changes a verdict.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.isolation import in_dtype
from manyformer.analysis.contracts.leak_input import TRACED_LENGTHS, LeakInput, OutOfTime, draw_inputs, fitting_lengths
from manyformer.analysis.contracts.leak_place import LeakKind, LeakPlace
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
from manyformer.analysis.contracts.subject import AdapterSubject, Untestable
from manyformer.analysis.contracts.token_exchange import (
    Forward,
    Leak,
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

MAX_SECONDS = 10.0
"""The time that the search of an input may take, and that of a submodule; what is found by then is told."""

MAX_TOTAL_SECONDS = 40.0
"""The time that all searches of one check may take before the last."""

EXACT_TOLERANCE = 1e-7
"""The largest change that is rounding where the same operators run on equal shapes in float32."""

OTHER_ROWS = (2, 3, 5, 7)

LATER = frozenset({"causal", "causal-gradient", "causal-training", "causal-autocast"})
WITH_EVIDENCE = LATER - {"causal-gradient"}
CACHED = frozenset({"cached", "prefill", "decode", "preallocated"})


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
        self._seconds = 0.0

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
        if evidence is None and name in WITH_EVIDENCE:
            # it failed because nothing changes, not because something leaks
            return None
        training = name.endswith("training")
        if self._seconds > MAX_TOTAL_SECONDS:
            return LeakPlace(kind, training, notes=("the place was not looked for: others took too long",))
        start = time.monotonic()
        try:
            place = _LeakSearch(kind, name, trial, evidence).find()
        # a place is an addition: the contract has its verdict, whatever a model raises here
        except Exception as error:
            place = LeakPlace(kind, training, notes=(f"the place was not found: {type(error).__name__} was raised",))
        self._seconds += time.monotonic() - start
        if place is None:
            return LeakPlace(kind, training, notes=("the place was not found: no short input shows it",))
        return place


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
        # of an adapter nobody knows whether it computes in float64 throughout: its logits show it
        may_convert = self.subject.exact or isinstance(self.subject, AdapterSubject)
        on_cpu = self.subject.token_ids.device.type == "cpu"
        if self.contract == "causal-autocast" or self.subject.module is None or not may_convert or not on_cpu:
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
                if self.dtype not in (None, logits.dtype):
                    raise TypeError(f"the logits are in {logits.dtype}")
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
        return self.subject.float32_tolerance * self.scale

    def _find_later(self, forward: Forward) -> _Found | None:
        tolerance = None if self.dtype == torch.float64 else EXACT_TOLERANCE
        search = LeakInput(self.trial, forward, self.evidence, tolerance, lambda: self.allowed)
        leak = search.find()
        if leak is None or leak.exchange is None:
            return None
        fields: dict[str, Any] = {
            "output": leak.first_output,
            "token": leak.exchange.start,
            "size": leak.size,
            "relative_size": leak.size / leak.scale if leak.scale else None,
            "length": leak.inputs.tokens.shape[1],
            "tokens": _rows(leak.inputs.tokens),
            "exchanged": _rows(leak.exchanged_inputs().tokens),
        }
        traced = leak
        try:
            traced = search.traceable(leak)
            fields["matrix"] = search.matrix(leak)
        except OutOfTime:
            search.notes.append("the matrix was left out, as it would have taken too long")
        self.notes += search.notes
        return _Found(_later_pair(forward, traced), fields)

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
            for length in fitting_lengths(self.subject, (2, 4, 8, *TRACED_LENGTHS, self.trial.long_length)):
                inputs = draw_inputs(self.trial, 1, length)
                for size in dict.fromkeys(fitting_lengths(self.subject, (length - 1, length // 2, 1))):
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
                for length in fitting_lengths(self.subject, lengths):
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
            for length in fitting_lengths(self.subject, (2, 4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                inputs = draw_inputs(self.trial, 1, length)
                first = self.trial.tokens(1, length)
                second = self.trial.different_tokens(first)
                part = RunPart(1, length, 0, 0, length)

                def run(targets: Tensor, inputs: Inputs = inputs) -> Tensor:
                    logits = self.subject.logits_with_targets(inputs, targets)
                    self.scale = max(self.scale, float(logits.abs().max()))
                    return logits

                pair = Pair(Run(partial(run, first), part), Run(partial(run, second), part))
                yield pair, {"length": length, "tokens": _rows(first), "exchanged": _rows(second)}

        return self._first_that_shows(pairs())

    def _find_cache(self, forward: Forward) -> _Found | None:
        def pairs() -> Iterator[tuple[Pair, dict[str, Any]]]:
            lengths = fitting_lengths(self.subject, (2, 3, 4, 6, 8, *TRACED_LENGTHS[:6], self.trial.length))
            # several rows, if one does not show it: the states of rows may be confused
            for rows, length in itertools.product((1, 3, 5), lengths):
                inputs = draw_inputs(self.trial, rows, length)
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
        thirds = [third] * (length // third - 1)
        return [[half, *[1] * (length - half)], [half, length - half], [*thirds, length - sum(thirds)]]

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
            for length in fitting_lengths(self.subject, (4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
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
            for length in fitting_lengths(self.subject, (4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
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
            for length in fitting_lengths(self.subject, (2, 4, 8, *TRACED_LENGTHS[:6], self.trial.length)):
                inputs = draw_inputs(self.trial, 1, length)
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
        self.deadline = time.monotonic() + MAX_SECONDS
        try:
            trace = self._trace(module, pair)
        except OutOfTime:
            self.notes.append("the submodule was not looked for, as the search took too long")
            return {}
        except TooLarge:
            self.notes.append("the submodule was not looked for: the outputs of all of them are too large")
            return {}
        if trace is None:
            self.notes.append("no submodule gives other outputs for equal inputs")
            return {}
        first = trace.culprits[0]
        if not trace.judges_later_calls:
            self.notes.append("later modules were not judged")
        fields: dict[str, Any] = {
            "module": first.key.module,
            "module_class": type(first.module).__name__,
            "after": first.after,
            "before": first.before,
            "layers": names_of(trace.culprits, type(first.module)),
            "layer_count": same_class(module, first.module),
        }
        statement = self._find_statement(pair, first, trace.comparison)
        return fields if statement is None else fields | statement._asdict()

    def _trace(self, module: nn.Module, pair: Pair) -> ModuleTrace | None:
        """The comparison of both runs under the largest tolerance that shows a difference."""
        for tolerance in self._trace_tolerances():
            floating_only = self.kind == "targets"
            comparison = PartComparison(pair.first.part, pair.second.part, tolerance, floating_only=floating_only)
            trace = ModuleTrace(module, comparison)
            trace.compare(*pair)
            if trace.culprits:
                return trace
        return None

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


def _later_pair(forward: Forward, leak: Leak) -> Pair:
    assert leak.exchange is not None
    part = RunPart(1, leak.inputs.tokens.shape[1], 0, 0, leak.exchange.start)
    return Pair(Run(partial(forward, leak.inputs), part), Run(partial(forward, leak.exchanged_inputs()), part))


def _rows(tokens: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in tokens.tolist())
