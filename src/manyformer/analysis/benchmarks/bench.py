"""`bench` measures time, memory and operations of recipes against length.

`CandidateBench` has the jobs of a recipe: a forward pass, a training step, and decoding after a long prompt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import Parameter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from manyformer.analysis.benchmarks.bench_report import (
    BENCH_KINDS,
    FAILED,
    BenchCandidate,
    BenchCell,
    BenchKind,
    BenchReport,
    MachineInfo,
)
from manyformer.analysis.benchmarks.measuring import (
    TimedJob,
    extra_memory,
    is_noisy,
    load_average,
    load_warning,
    median_with_quartiles,
    paired_ratio,
    take_turns,
    time_job,
)
from manyformer.base.errors import UserError
from manyformer.models.tasks import Inputs
from manyformer.nn.core import State, state_bytes
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.runtime.devices import best_device, device_kind, gpu_name
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import task_of
from manyformer.training.step_job import StepJob, own_engine

REFERENCE = "transformer-lm"
"""Dense softmax attention, the baseline of all ratios."""

NOISY_NOTE = "its times vary widely because of other load on the machine; ratios of paired runs are more reliable"

LENGTHS = (256, 512, 1024, 2048)

BenchPrecision = Literal["auto", "float32", "bfloat16"]

SIZES: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4, "dropout": 0.0}
"""Default keywords of all recipes, so that they are comparable."""

LEARNING_RATE = 1e-4

NEW_TOKENS = 16
"""Tokens that a decoding job generates; its time is divided by this."""


class BenchSetting(NamedTuple):
    """Settings shared by all candidates."""

    device: torch.device
    batch: int
    max_length: int
    precision: BenchPrecision
    seed: int
    keywords: dict[str, Any]


class CandidateBench:
    """One candidate's model and its jobs. Raises UserError for unknown recipes or keywords."""

    def __init__(self, candidate: BenchCandidate, setting: BenchSetting) -> None:
        recipe = get_recipe(candidate.recipe)
        parameters = recipe.signature.parameters
        # room for the tokens that decoding adds behind the longest prompt
        shared = {**SIZES, "max_length": setting.max_length + NEW_TOKENS, **setting.keywords}
        keywords = {name: value for name, value in shared.items() if name in parameters} | candidate.keywords
        if "max_length" not in {**setting.keywords, **candidate.keywords}:
            keywords |= _whole_blocks(keywords, parameters)
        # every candidate from the same seed, whatever was built before it
        torch.manual_seed(setting.seed)
        self.label = candidate.label
        self.setting = setting
        self.card = recipe.card
        self.model = build(candidate.recipe, **keywords).to(setting.device)
        self.task = task_of(self.model)
        self.vocab = self.task.token_ids(self.model)
        self.engine = own_engine(self.model, autocast=None if self.precision == "float32" else torch.bfloat16)
        self.generator = torch.Generator().manual_seed(setting.seed)

    def unsupported_reason(self, kind: BenchKind) -> str | None:
        """The reason why this kind cannot be measured, or None."""
        if self.task.fixed_length(self.model) is not None:
            return "its images have a fixed size, so there is no length to vary"
        if kind == "decode":
            return self.card.reasons.get("incremental_decoding")
        return None

    def forward_decoding_note(self) -> str | None:
        """The layers that decode by `forward` because they have no faster one-token step; None if there are none."""
        if self.unsupported_reason("decode") is not None:
            return None
        layers = self.model.layers_without_step()
        names = ", ".join([*layers[:3], *(["..."] if len(layers) > 3 else [])])
        if layers:
            return f"{self.label}: decodes by forward in {names}, which have no one-token step"
        return None

    def job(self, kind: BenchKind, length: int) -> TimedJob:
        """A job that runs `kind` once on sequences of `length` tokens."""
        if kind == "decode":
            return self._decode_job(length)
        inputs = self._random_inputs(length)
        if kind == "forward":
            return self._forward_job(inputs)
        return self._step_job(inputs)

    def runs_per_job(self, kind: BenchKind) -> int:
        """The divisor of a job's time: decoding is reported per token."""
        if kind == "decode":
            return NEW_TOKENS
        return 1

    def state_bytes(self, length: int) -> int:
        """Size of the decoding state after `length` tokens, in bytes."""
        with torch.inference_mode(), self._autocast():
            return state_bytes(self._prefill(length, capacity=None)[1])

    def _forward_job(self, inputs: Inputs) -> TimedJob:
        arguments = self.task.arguments(self.model, inputs)

        def forward() -> None:
            self.model.eval()
            with torch.inference_mode(), self._autocast():
                self.model(*arguments)

        return forward

    def _step_job(self, inputs: Inputs) -> TimedJob:
        targets = self.task.random_targets(self.model, inputs, self.generator)
        batch = self.task.batch(self.model, inputs, targets)

        return StepJob(self.engine, [batch], learning_rate=LEARNING_RATE)

    def _decode_job(self, length: int) -> TimedJob:
        """Greedy decoding of `NEW_TOKENS` tokens, from the same state in every run.

        As in `generate`, the decoding function is bound beforehand.
        """
        model = self.model.eval()
        bind = self.task.one_token_step(model)
        assert bind is not None
        with torch.inference_mode(), self._autocast():
            # once, outside of the timed job: the state is not changed by decoding from it
            first_token, start, memory = self._prefill(length, capacity=length + NEW_TOKENS)
            # binding looks at every layer, which a generation does once
            decode_token = bind()

        def decode() -> Tensor:
            token = first_token
            state = start
            generated = []
            with torch.inference_mode(), self._autocast():
                for _ in range(NEW_TOKENS):
                    logits, state = decode_token(token, state, memory)
                    token = logits.argmax(-1)
                    generated.append(token)
            return torch.cat(generated, dim=1)

        return decode

    def _prefill(self, length: int, *, capacity: int | None) -> tuple[Tensor, State, Any]:
        """The most likely token after a random prompt of `length` tokens, the state, and the encoded source if any."""
        prompt = self._random_inputs(length)
        start = self.task.init_state(self.model, prompt, capacity=capacity)
        out = self.task.call(self.model, prompt, start)
        memory, state = out.state if self.task.takes_source else (None, out.state)
        return out.logits[:, -1:].argmax(-1), state, memory

    def _random_inputs(self, length: int) -> Inputs:
        source = None
        if self.task.takes_source:
            source = self._random_tokens(length)
        return Inputs(self._random_tokens(length), source=source)

    def _random_tokens(self, length: int) -> Tensor:
        shape = (self.setting.batch, length)
        return torch.randint(0, self.vocab, shape, generator=self.generator).to(self.setting.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.setting.device.type, torch.bfloat16)

    @property
    def precision(self) -> str:
        """The precision that "auto" resolves to, as in training."""
        if self.setting.precision != "auto":
            return self.setting.precision
        kind = device_kind(self.setting.device)
        if kind.half_by_default and kind.has_bfloat16():
            return "bfloat16"
        return "float32"


def _whole_blocks(keywords: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """The chosen `max_length`, raised to a multiple of the recipe's `block`, if it has both."""
    if "block" not in parameters or "max_length" not in keywords:
        return {}
    block = keywords.get("block", parameters["block"].default)
    if not isinstance(block, int):
        return {}
    return {"max_length": -(-keywords["max_length"] // block) * block}


class WarmJob(NamedTuple):
    """A job that has run once, with its time, memory and operations."""

    job: TimedJob
    seconds: float
    memory: int | None
    flops: int | None


def bench(
    recipes: Sequence[str | BenchCandidate],
    lengths: Iterable[int] = LENGTHS,
    *,
    what: Iterable[BenchKind] = BENCH_KINDS,
    against: str | None = REFERENCE,
    keywords: Mapping[str, Any] | None = None,
    batch: int = 1,
    rounds: int = 7,
    max_seconds: float = 60.0,
    device: str | None = None,
    precision: BenchPrecision = "auto",
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure recipes side by side: forward pass, training step and decoding at each length.

    All are built with the same sizes (`SIZES`, overridden by `keywords`; keywords that a recipe lacks are dropped) and
    are timed in interleaved rounds. `against` is measured as well and is the reference of ratios (None: no reference).
    A candidate that takes more than `max_seconds` seconds for one run is not run at greater lengths. `on_progress` is
    called with a description of each measurement. Raises UserError for invalid arguments.
    """
    candidates = _resolve_candidates(recipes, against)
    sizes = _check_arguments(lengths, batch, rounds, what)
    if device is None:
        torch_device = best_device()
    else:
        torch_device = torch.device(device)
    setting = BenchSetting(torch_device, batch, max(sizes), precision, seed, dict(keywords or {}))
    # before the measurement, whose own load would be seen after it
    load = load_average()
    notes = [warning] if (warning := load_warning()) else []
    benches, failed = _build_benches(candidates, setting, against)
    cells: list[BenchCell] = []
    for kind in dict.fromkeys(what):
        # for each kind anew: who is too slow in training may be fast in decoding
        reasons_to_skip: dict[str, str] = {}
        cells += [BenchCell(label, kind, length, reason=reason) for length in sizes for label, reason in failed.items()]
        for length in sizes:
            on_progress(f"{kind}, length {length:,}")
            cells += _measure(benches, kind, length, against, rounds, max_seconds, reasons_to_skip)
    machine = MachineInfo(
        device=gpu_name(torch_device) or torch_device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        precision=next(iter(benches.values())).precision,
        batch=batch,
        rounds=rounds,
        load=load,
    )
    if "decode" in what:
        notes += [note for candidate_bench in benches.values() if (note := candidate_bench.forward_decoding_note())]
    return BenchReport(tuple(candidates), against, machine, tuple(cells), tuple(notes))


def _build_benches(
    candidates: Sequence[BenchCandidate], setting: BenchSetting, against: str | None
) -> tuple[dict[str, CandidateBench], dict[str, str]]:
    """The candidates that can be built, and the reasons of those that cannot.

    Raises UserError for unknown recipes, and if none but the reference can be built."""
    benches: dict[str, CandidateBench] = {}
    failed: dict[str, ValueError] = {}
    for candidate in candidates:
        get_recipe(candidate.recipe)
        try:
            benches[candidate.label] = CandidateBench(candidate, setting)
        except ValueError as error:
            failed[candidate.label] = error
    if failed and not benches.keys() - {against}:
        raise next(iter(failed.values()))
    return benches, {label: f"{FAILED}{error}" for label, error in failed.items()}


def _resolve_candidates(recipes: Sequence[str | BenchCandidate], against: str | None) -> list[BenchCandidate]:
    candidates = [BenchCandidate(recipe, recipe) if isinstance(recipe, str) else recipe for recipe in recipes]
    if not candidates:
        raise UserError("nothing to measure: give at least one recipe")
    labels = [candidate.label for candidate in candidates]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"the label '{repeated}' is used twice: give the candidates different labels")
    if against is not None and against not in labels:
        candidates = [BenchCandidate(against, against), *candidates]
    return candidates


def _check_arguments(lengths: Iterable[int], batch: int, rounds: int, kinds: Iterable[BenchKind]) -> list[int]:
    sizes = sorted(set(lengths))
    if not sizes or sizes[0] < 1:
        raise UserError(f"lengths must be 1 or more tokens, got {sizes}")
    for name, value in (("batch", batch), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if unknown := set(kinds) - set(BENCH_KINDS):
        raise UserError(f"what ('{min(unknown)}') must be among {', '.join(BENCH_KINDS)}")
    return sizes


def _measure(
    benches: Mapping[str, CandidateBench],
    kind: BenchKind,
    length: int,
    against: str | None,
    rounds: int,
    max_seconds: float,
    reasons_to_skip: dict[str, str],
) -> list[BenchCell]:
    """One cell for each candidate; `reasons_to_skip` collects those that are not run at greater lengths."""
    cells: dict[str, BenchCell] = {}
    warm_jobs: dict[str, WarmJob] = {}
    for label, candidate_bench in benches.items():
        reason = reasons_to_skip.get(label) or candidate_bench.unsupported_reason(kind)
        if reason is None:
            result = _prepare(candidate_bench, kind, length, max_seconds)
            if isinstance(result, WarmJob):
                warm_jobs[label] = result
            else:
                reason = result
                reasons_to_skip[label] = reason
        cells[label] = BenchCell(label, kind, length, reason=reason)
    jobs = {label: warm_job.job for label, warm_job in warm_jobs.items()}
    expected_seconds = {label: warm_job.seconds for label, warm_job in warm_jobs.items()}
    times = take_turns(jobs, rounds, next(iter(benches.values())).setting.device, expected_seconds=expected_seconds)
    for label, warm_job in warm_jobs.items():
        runs = benches[label].runs_per_job(kind)
        cells[label] = _with_times(cells[label], warm_job, [time / runs for time in times[label]])
        # the reference itself may have failed, be too slow or out of memory at this length
        if against in times:
            ratio = paired_ratio(times[label], times[against])
            cells[label] = replace(cells[label], ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high)
    return list(cells.values())


def _with_times(cell: BenchCell, warm_job: WarmJob, times: Sequence[float]) -> BenchCell:
    """The cell with its times in all rounds, and what was measured while its job was warmed up."""
    seconds = median_with_quartiles(times)
    return replace(
        cell,
        seconds=seconds.median,
        lower_quartile=seconds.low,
        upper_quartile=seconds.high,
        memory=warm_job.memory,
        flops=warm_job.flops,
        reason=NOISY_NOTE if is_noisy(times) else None,
    )


def _prepare(candidate_bench: CandidateBench, kind: BenchKind, length: int, max_seconds: float) -> WarmJob | str:
    """Warm the job up and measure its memory and operations; a string is the reason why it cannot be run."""
    device = candidate_bench.setting.device
    try:
        job = candidate_bench.job(kind, length)
        # also the first run, which fills caches before the job is timed
        flops = count_flops(job) // candidate_bench.runs_per_job(kind)
        seconds = time_job(job, device)
        memory = candidate_bench.state_bytes(length) if kind == "decode" else extra_memory(job, device)
    except (MemoryError, torch.OutOfMemoryError):
        return f"out of memory at length {length:,}"
    except ValueError as error:
        return f"{FAILED}{error}"
    except RuntimeError as error:
        # torch has no exception type for a failed CPU allocation
        if "allocate memory" not in str(error):
            raise
        return f"out of memory at length {length:,}"
    if seconds > max_seconds:
        return f"too slow from length {length:,} on: one run takes {seconds:.0f} s, the limit is {max_seconds:.0f} s"
    return WarmJob(job, seconds, memory, flops)
