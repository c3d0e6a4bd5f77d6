"""`check`: run the contracts that a model promises and report the results."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from manyformer.analysis.contracts import (
    causality_contracts,
    decoding_contracts,
    equivalence_contracts,
    prefix_contracts,
    row_contracts,
    state_contracts,
    training_contracts,
)
from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow, ContractVerdict
from manyformer.analysis.contracts.found_subject import HOW_TO_SAY, ExportedModule, FoundSubject, is_exported
from manyformer.analysis.contracts.hugging_face import HuggingFace, is_hugging_face
from manyformer.analysis.contracts.isolation import (
    in_dtype,
    own_values,
    restoring_attributes,
    restoring_model_and_rng,
    working_dtype,
)
from manyformer.analysis.contracts.leak_search import PlaceFinder
from manyformer.analysis.contracts.subject import (
    Adapter,
    AdapterSubject,
    Subject,
    Untestable,
    seed_everything,
)
from manyformer.analysis.contracts.trial import FLOAT64_TOLERANCE, Backend, Contract, ContractTrial
from manyformer.base.errors import UserError, suggest_names

# without repeatable outputs nothing can be compared, so that these are the first
_FIRST = (equivalence_contracts.repeatable, equivalence_contracts.seed, equivalence_contracts.traceless)
_MODULES = (
    causality_contracts,
    prefix_contracts,
    decoding_contracts,
    row_contracts,
    training_contracts,
    equivalence_contracts,
    state_contracts,
)

CONTRACTS = {
    item.name: item
    for item in (*_FIRST, *(item for module in _MODULES for item in vars(module).values()))
    if isinstance(item, Contract)
}
"""All contracts by their names, in the order of the report."""

OTHER_SHAPES = ("length", "cached", "prefill", "beams")
"""Contracts that compare calls of other lengths, in which a model that draws random numbers draws others."""

STEP_LENGTH = 48
"""The length of sequences in contracts that take many single steps."""

LONG_LENGTH = 512
"""The length of sequences in causality contracts: leaks of patterns and chunks show only beyond their size."""

PROBE_LENGTH = 2048
"""The largest length of the sequences that show leaks beyond `LONG_LENGTH`, if the model allows it."""

LONGER_LENGTHS = (128, 256, LONG_LENGTH)
"""Lengths of causality contracts of a model whose speed is measured, as far as `EXCHANGE_SECONDS` suffice."""

EXCHANGE_SECONDS = 1.5
"""The time that exchanging each token of a sequence once may take, where the model's speed decides its length."""

MIN_LENGTH = 12
"""The least length: below it, the documents of the packing contracts would be empty."""


def check(
    model: nn.Module | Adapter | Subject,
    *,
    length: int | None = None,
    seed: int = 0,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    compiler: Backend = "aot_eager",
    vocabulary: int | None = None,
    max_length: int | None = None,
    causal: bool = True,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Run the contracts of a model: causality, recurrent decoding, padding, packing, gradients, precision and more.

    `model` is a Hugging Face model, an `Adapter`, a `Subject`, or any other module, whose form of call is found by
    trial: `vocabulary` and `max_length` are not looked for if they are given, and `causal=False` is an encoder.
    `length` is the length of all sequences, by default 64 tokens for such modules, else 48 in contracts of many steps,
    and up to 512 in causality contracts, for such modules as far as they are fast: each of these tokens is exchanged
    once, and a few in up to 2048. `only` and `skip` name contracts; "compile" takes seconds, and "learns" runs only if
    it is named. `on_row` is called with each finished row. The model is left unchanged. Raises UserError for a model
    that cannot be checked.
    """
    subject = find_subject(model, {"vocabulary": vocabulary, "max_length": max_length, "causal": causal})
    selected = _select_contracts(only, skip)
    lengths = _choose_lengths(subject, length)
    rows: list[ContractRow] = []
    places = PlaceFinder()
    # without gradients, as most contracts compare outputs alone; those that need them switch them on themselves
    with restoring_model_and_rng(subject.module), subject.session(), torch.no_grad():
        subject.seed = seed
        for contract in CONTRACTS.values():
            if contract.name in selected:
                row = _row_without_run(contract, subject, rows)
                if row is None:
                    row = _run_contract(contract, subject, lengths, seed, compiler, places)
                elif row.verdict == "not promised" and contract.name in subject.measured_anyway:
                    # the number is worth knowing, but a failure is none: the model promises nothing here
                    measured = _run_contract(contract, subject, lengths, seed, compiler, places)
                    sentence = f"{row.sentence}; measured: {measured.sentence}"
                    row = measured._replace(verdict=row.verdict, sentence=sentence, place=None)
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    return CheckReport(subject.name, tuple(rows), lengths, seed, subject.assumptions)


def find_subject(model: nn.Module | Adapter | Subject, options: Mapping[str, Any] = MappingProxyType({})) -> Subject:
    """The subject for any `model` that `check` accepts. Raises UserError for others."""
    subject = _known_subject(model)
    if subject is None:
        module = model if isinstance(model, nn.Module) else ExportedModule(model)
        return FoundSubject(module, **options)
    given = [name for name, value in options.items() if value is not None and value is not True]
    if given:
        raise UserError(f"{', '.join(given)} is for a module of which nothing is known; {subject.name} says it itself")
    return subject


def _known_subject(model: object) -> Subject | None:
    """The subject for a model that says itself how it is called; None for any other module."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, Adapter):
        return AdapterSubject(model)
    if isinstance(model, nn.Module):
        return HuggingFace(model) if is_hugging_face(model) else None
    if is_exported(model):
        return None
    raise UserError(f"{type(model).__name__} is neither a module nor a name: mf.check({HOW_TO_SAY})")


def _select_contracts(only: Collection[str] | None, skip: Collection[str]) -> set[str]:
    for name in (*(only or ()), *skip):
        if name not in CONTRACTS:
            raise UserError(f"there is no contract '{name}'; {suggest_names(name, CONTRACTS)}")
    default_names = {name for name, contract in CONTRACTS.items() if contract.runs_by_default}
    return (default_names if only is None else set(only)) - set(skip)


def _choose_lengths(subject: Subject, length: int | None) -> CheckLengths:
    """The sequence lengths of the contracts. Raises UserError."""
    max_length = subject.max_length
    multiple = subject.length_multiple
    if max_length is not None and max_length < MIN_LENGTH:
        raise UserError(f"{subject.name} allows at most {max_length} tokens, too few to check: {MIN_LENGTH} are needed")
    if length is not None and not MIN_LENGTH <= length <= (max_length or length):
        if max_length is None:
            allowed = f"at least {MIN_LENGTH}"
        else:
            allowed = f"from {MIN_LENGTH} to {max_length}"
        raise UserError(f"length ({length}) must be {allowed} tokens")

    def round_length(size: int) -> int:
        # rounded up, or down where that would exceed the model's max_length
        rounded = -(-size // multiple) * multiple
        if max_length is None:
            return rounded
        return min(rounded, max_length // multiple * multiple)

    if length is not None:
        # a given length holds for every contract, so that the time of a check can be bounded
        return CheckLengths(round_length(length), round_length(length), None)
    probe = round_length(PROBE_LENGTH)
    if subject.default_length is None:
        steps = round_length(STEP_LENGTH)
        long = round_length(LONG_LENGTH)
    else:
        steps = round_length(max(subject.default_length, subject.min_length))
        long = _affordable_length(subject, [steps, *map(round_length, LONGER_LENGTHS)])
    return CheckLengths(steps, long, probe if probe > long else None)


def _affordable_length(subject: Subject, lengths: Sequence[int]) -> int:
    """The greatest of the lengths at which exchanging each token once takes little time; at least the first."""
    affordable = [length for length in lengths if length**2 * subject.seconds_per_token <= EXCHANGE_SECONDS]
    return max([lengths[0], *affordable])


def _row_without_run(contract: Contract, subject: Subject, rows: list[ContractRow]) -> ContractRow | None:
    """The row of a contract that is not promised or cannot be run; None if it is to be run."""
    # a card may excuse one contract, or a promise that several contracts need
    for need in (contract.name, *contract.needs):
        if need in subject.not_promised:
            return ContractRow(contract.name, "not promised", f"not promised: {subject.not_promised[need]}")
    if any(row.contract == "repeatable" and row.verdict == "failed" for row in rows):
        sentence = "not run: the model is not repeatable, so outputs cannot be compared"
        return ContractRow(contract.name, "not run", sentence)
    if contract.name in OTHER_SHAPES and any(row.contract == "seed" and row.verdict == "failed" for row in rows):
        sentence = "not run: the model draws random numbers, and others for other lengths"
        return ContractRow(contract.name, "not run", sentence)
    return None


def _run_contract(
    contract: Contract, subject: Subject, lengths: CheckLengths, seed: int, compiler: Backend, places: PlaceFinder
) -> ContractRow:
    """The row of a contract, run in float64 if the contract and the subject allow it."""
    if contract.exact and subject.exact:
        row = _run_in_precision(contract, subject, lengths, seed, compiler, places, exact=True)
        # to compute in float64 is the check's wish: what float64 alone raises is no fault of a stranger's model
        if row is not None:
            return row
    row = _run_in_precision(contract, subject, lengths, seed, compiler, places, exact=False)
    assert row is not None
    return row


def _run_in_precision(
    contract: Contract,
    subject: Subject,
    lengths: CheckLengths,
    seed: int,
    compiler: Backend,
    places: PlaceFinder,
    *,
    exact: bool,
) -> ContractRow | None:
    """The row of a contract; None if a model raises in float64 and may be tried in float32."""
    # each contract draws from a generator of its own: with `only` it sees the same inputs as in a whole check
    generator = torch.Generator().manual_seed(seed)
    trial = ContractTrial(
        subject,
        generator,
        length=lengths.steps,
        long_length=lengths.long,
        probe_length=lengths.probe,
        tolerance=FLOAT64_TOLERANCE if exact else subject.float32_tolerance,
        backend=compiler,
    )
    seed_everything(seed)
    try:
        with restoring_attributes(subject.module), in_dtype(subject.module, working_dtype(subject.module, exact=exact)):
            finding = contract.run(trial)
        place = None
        if not finding.passed:
            with restoring_attributes(subject.module):
                place = places.find(contract, trial, finding.evidence)
    except Untestable as error:
        return ContractRow(contract.name, "not run", f"not run: {error}")
    # whatever a model raises is a finding about it; the other contracts are still worth running
    except Exception as error:
        if exact and not subject.runs_every_input:
            return None
        # messages of compilers span pages, and a row of the table is one line
        message = re.sub(r"\s+", " ", str(error)).strip()
        sentence = f"raised {type(error).__name__}: {message[:300]}"
        if subject.runs_every_input or contract.name in subject.must_run:
            return ContractRow(contract.name, "failed", sentence)
        return ContractRow(contract.name, "not run", f"not run: the model {sentence}")
    verdict: ContractVerdict = "passed" if finding.passed else "failed"
    sentence = finding.sentence
    if verdict == "failed" and _passes_as_given(contract, trial, seed, exact=exact):
        sentence = f"{sentence}; parameters that are perturbed hide this as they are: {subject.perturbed[0]} or others"
    # logits that are not finite are no matter of precision
    if verdict == "failed" and contract.name in subject.notes and not _is_nan(finding.measured):
        verdict = "not promised"
        place = None
        sentence = f"not promised: {subject.notes[contract.name]}; measured: {sentence}"
    return ContractRow(contract.name, verdict, sentence, finding.measured, finding.tolerance, place)


def _passes_as_given(contract: Contract, trial: ContractTrial, seed: int, *, exact: bool) -> bool:
    """Whether a contract that failed passes while no parameter is perturbed, as zeros hide what is behind them."""
    subject = trial.subject
    if not subject.own_values:
        return False
    again = replace(trial, generator=torch.Generator().manual_seed(seed), differences=[])
    dtype = working_dtype(subject.module, exact=exact)
    seed_everything(seed)
    try:
        with own_values(subject.own_values), restoring_attributes(subject.module), in_dtype(subject.module, dtype):
            return contract.run(again).passed
    # whatever a model raises, it has been told that the contract is broken
    except Exception:
        return False


def _is_nan(number: float | None) -> bool:
    return number is not None and math.isnan(number)
