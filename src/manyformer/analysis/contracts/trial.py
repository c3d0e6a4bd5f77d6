"""`Contract`, a promise with its test, and `ContractTrial`, one run of it: random inputs and comparisons.

The inputs may be documents of different lengths: padded, or packed several to a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from manyformer.analysis.contracts.isolation import training_mode
from manyformer.analysis.contracts.subject import PaddingSide, Subject, SubjectOutput
from manyformer.nn.model_inputs import PADDING_SEGMENT, Inputs, State

if TYPE_CHECKING:
    from jaxtyping import Int

Backend = Literal["aot_eager", "inductor"]

T = TypeVar("T")

MAX_NAMES = 4
"""The largest number of names in a sentence."""

FLOAT64_TOLERANCE = 1e-9
"""The largest difference of equal results in float64 and in float32, relative to the logits."""


class ContractFinding(NamedTuple):
    """The result of a contract: whether it passed, a sentence, the measured number and its upper bound.

    `evidence` is the exchange of tokens that broke it, from which the search of its place begins.
    """

    passed: bool
    sentence: str
    measured: float | None = None
    tolerance: float | None = None
    evidence: object = None


def passed(sentence: str, measured: float | None = None, tolerance: float | None = None) -> ContractFinding:
    """The finding of a contract that passed."""
    return ContractFinding(passed=True, sentence=sentence, measured=measured, tolerance=tolerance)


def failed(sentence: str, measured: float | None = None, tolerance: float | None = None) -> ContractFinding:
    """The finding of a contract that failed."""
    return ContractFinding(passed=False, sentence=sentence, measured=measured, tolerance=tolerance)


def join_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    omitted = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {omitted} more" if omitted > 0 else "")


def join_numbers(numbers: Sequence[int]) -> str:
    """The numbers as text: "3, 13 and 33"."""
    *first, last = (str(number) for number in numbers)
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


@final
@dataclass(frozen=True)
class ContractTrial:
    """One run of a contract: its subject, random inputs, and the comparisons that decide it.

    Sequences have `length` tokens in tests of many steps, `long_length` in those of few calls. A few of
    `probe_length` tokens, unless it is None, show leaks that begin beyond `long_length`.
    """

    subject: Subject
    generator: torch.Generator
    length: int
    long_length: int
    probe_length: int | None
    tolerance: float
    backend: Backend = "aot_eager"
    differences: list[tuple[float, str]] = field(default_factory=list)
    """Every comparison so far: the largest difference, relative to the expected values, and what was compared."""

    def round_length(self, length: int) -> int:
        """The nearest length that the subject takes: a multiple of its `length_multiple`, at least its `min_length`."""
        multiple = self.subject.length_multiple
        least = -(-self.subject.min_length // multiple)
        return max(round(length / multiple), least, 1) * multiple

    def random_int(self, below: int) -> int:
        """A random integer from 0 to `below` - 1."""
        return int(torch.randint(below, (), generator=self.generator))

    def tokens(self, rows: int, length: int) -> Int[Tensor, "b l"]:
        """Random tokens (rows, length)."""
        ids = self.subject.token_ids
        # drawn on the CPU: generators of accelerators give other numbers for the same seed
        return ids[torch.randint(len(ids), (rows, length), generator=self.generator).to(ids.device)]

    def different_tokens(self, tokens: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
        """Random tokens that differ from `tokens` at every position."""
        ids = self.subject.token_ids
        # a shift of 1 to n - 1 places among the ids never ends where it began
        shift = torch.randint(1, len(ids), tokens.shape, generator=self.generator).to(ids.device)
        return ids[(torch.searchsorted(ids, tokens.contiguous()) + shift) % len(ids)]

    def draw(self, rows: int, length: int, *, source: int | None = None) -> Inputs:
        """Random inputs with `length` tokens; an encoder-decoder also gets sources of `source` or 2/3 as many."""
        if not self.subject.takes_source:
            return Inputs(self.tokens(rows, length))
        return Inputs(self.tokens(rows, length), None, self.tokens(rows, source or length * 2 // 3 + 1))

    def documents(self, lengths: Sequence[int]) -> list[Inputs]:
        """Random inputs of one row for each length, with sources of other lengths, at most the largest length."""
        max_length = max(lengths)
        return [
            # sources of other lengths than the targets, so that a model that mixes them up fails
            self.draw(1, self.round_length(length), source=1 + (5 * index + length) % max_length)
            for index, length in enumerate(lengths)
        ]

    def capacities(self, length: int) -> tuple[int | None, ...]:
        """The capacities of the states to test: none, and one of `length` tokens if the subject promises that."""
        if "capacity" in self.subject.not_promised:
            return (None,)
        return (None, length)

    def run_in_chunks(
        self, inputs: Inputs, sizes: Sequence[int], *, capacity: int | None = None, state: State = None
    ) -> tuple[Tensor, State]:
        """Run the tokens in chunks, each from the state after the previous one; returns all logits and the last state.

        The first chunk is run from `state`, or else from the initial state with this `capacity`.
        """
        if state is None:
            state = self.subject.init_state(inputs, capacity=capacity)
        start = 0
        chunks = []
        for size in sizes:
            result = self.subject(inputs.columns(start, start + size), state)
            state = result.state
            start = start + size
            chunks.append(result.logits)
        return torch.cat(chunks, dim=1), state

    def compare(self, actual: Tensor, expected: Tensor, where: str) -> None:
        """Record how far two tensors differ, for `finding`. Raises ValueError if their shapes differ."""
        if actual.shape != expected.shape:
            raise ValueError(f"{where}: the shape is {tuple(actual.shape)}, {tuple(expected.shape)} was expected")
        if expected.numel():
            actual = actual.detach().cpu().double()
            expected = expected.detach().cpu().double()
            # relative to the largest logit, not to each one: logits near 0 carry the rounding of the others
            difference = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
            self.differences.append((float(difference), where))

    def finding(self, sentence: str, tolerance: float | None = None) -> ContractFinding:
        """The finding of all comparisons: `sentence` if all agree, else the location of the first that does not."""
        tolerance = self.tolerance if tolerance is None else tolerance
        # a NaN counts as larger than any number
        worst = max((difference for difference, _ in self.differences), key=lambda d: (math.isnan(d), d), default=0.0)
        # not `>`, which is False for a NaN
        failures = [(difference, where) for difference, where in self.differences if not difference <= tolerance]
        if not failures:
            return passed(sentence, worst, tolerance)
        # the first failure, not the largest: later ones mostly follow from it
        difference, where = failures[0]
        sentence = f"{where}: {difference:.1e} apart, one of {len(failures)} in {len(self.differences)}"
        return failed(sentence, worst, tolerance)


def gradients_of(trial: ContractTrial, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """The gradient of each parameter that requires one, by name.

    Gradients are accumulated by `backward`, because modules with their own backward pass, such as a reversible stack,
    do not support `torch.autograd.grad`.
    """
    module = trial.subject.module
    assert module is not None
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}

    def backward() -> dict[str, Tensor | None]:
        try:
            loss().backward()  # type: ignore[no-untyped-call]
            return {name: weight.grad for name, weight in weights.items()}
        finally:
            module.zero_grad(set_to_none=True)

    return differentiate(trial, backward)


def differentiate(trial: ContractTrial, run: Callable[[], T]) -> T:
    """Call `run` with gradients enabled; if that raises, in training mode, which some released models need."""
    module = trial.subject.module
    with torch.enable_grad():
        try:
            return run()
        except Exception:
            if module is None:
                raise
            with training_mode(module):
                return run()


@final
@dataclass(frozen=True)
class Contract:
    """A promise of a model, with the function that tests it.

    `needs` are the promises that it requires of a model. `exact` runs it in float64 if the model can be converted. A
    contract without `runs_by_default` runs only if it is named.
    """

    name: str
    promise: str
    run: Callable[[ContractTrial], ContractFinding]
    needs: tuple[str, ...] = ()
    exact: bool = False
    runs_by_default: bool = True


def contract(
    name: str, promise: str, *, needs: tuple[str, ...] = (), exact: bool = False, runs_by_default: bool = True
) -> Callable[[Callable[[ContractTrial], ContractFinding]], Contract]:
    """Decorate a test function to make it a `Contract`; `CONTRACTS` of `check` lists all contracts."""

    def make_contract(run: Callable[[ContractTrial], ContractFinding]) -> Contract:
        return Contract(name, promise, run, needs, exact, runs_by_default)

    return make_contract


class DocumentSlot(NamedTuple):
    """The position of a document in a batch: its row and its columns `start` to `stop`."""

    row: int
    start: int
    stop: int

    def logits_of(self, result: SubjectOutput, *, per_token: bool) -> Tensor:
        """The logits of the document: of its tokens, or of its row if a row has one label."""
        logits = result.logits[self.row]
        if per_token:
            return logits[self.start : self.stop]
        return logits


class RowItem(NamedTuple):
    """A document of a row, with `padding_before` columns of padding in front of it."""

    document: int
    padding_before: int = 0


def document_lengths(trial: ContractTrial) -> list[int]:
    """The lengths of four documents, one of them a single token."""
    return [trial.length, trial.length // 2 - 1, 1, trial.length - 1]


class PlacedTokens(NamedTuple):
    """The tokens of documents in rows, with segments that tell them from padding, and the slot of each document."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"]
    slots: list[DocumentSlot]


def pad_documents(
    trial: ContractTrial, documents: Sequence[Inputs], side: PaddingSide
) -> tuple[Inputs, list[DocumentSlot]]:
    """Pad the documents, one per row, and their sources on one side; returns the inputs and the slot of each."""
    return _place_with_sources(documents, lambda parts: pad_tokens(trial, parts, side))


def pack_documents(
    trial: ContractTrial, documents: Sequence[Inputs], rows: Sequence[Sequence[RowItem]]
) -> tuple[Inputs, list[DocumentSlot]]:
    """Pack the documents and their sources several to a row; returns the inputs and the slot of each."""
    # segment ids need not start at 0 nor be consecutive
    return _place_with_sources(documents, lambda parts: place_documents(trial, parts, rows, first_segment=3))


def _place_with_sources(
    documents: Sequence[Inputs], place: Callable[[Sequence[Tensor]], PlacedTokens]
) -> tuple[Inputs, list[DocumentSlot]]:
    placed = place([document.tokens for document in documents])
    inputs = Inputs(placed.tokens, placed.segments)
    sources = [document.source for document in documents if document.source is not None]
    if sources:
        placed_sources = place(sources)
        inputs = inputs._replace(source=placed_sources.tokens, source_segments=placed_sources.segments)
    return inputs, placed.slots


def pad_tokens(trial: ContractTrial, parts: Sequence[Tensor], side: PaddingSide) -> PlacedTokens:
    """Pad the parts, one per row, on one side."""
    width = max(part.shape[1] for part in parts)
    paddings = [width - part.shape[1] if side == "left" else 0 for part in parts]
    return place_documents(trial, parts, [[RowItem(index, padding)] for index, padding in enumerate(paddings)])


def place_documents(
    trial: ContractTrial, parts: Sequence[Tensor], rows: Sequence[Sequence[RowItem]], *, first_segment: int = 0
) -> PlacedTokens:
    """The parts, placed in rows.

    Padding is random tokens, so that a model that attends to it fails. Segments are `first_segment`, + 2, and so on.
    """
    # as wide as the fullest row, and up to the next length that the model allows
    width = max(sum(parts[item.document].shape[1] + item.padding_before for item in row) for row in rows)
    tokens = trial.tokens(len(rows), trial.round_length(width))
    segments = torch.full_like(tokens, PADDING_SEGMENT)
    slots: dict[int, DocumentSlot] = {}
    for row, items in enumerate(rows):
        stop = 0
        for position, item in enumerate(items):
            part = parts[item.document]
            start = stop + item.padding_before
            stop = start + part.shape[1]
            tokens[row, start:stop] = part[0]
            # gaps between the numbers, because a model may compare them but not count with them
            segments[row, start:stop] = first_segment + 2 * position
            slots[item.document] = DocumentSlot(row, start, stop)
    return PlacedTokens(tokens, segments, [slots[document] for document in range(len(parts))])
