"""`bench` measures time, memory and operations of recipes against length."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from manyformer.bench.bench_report import BenchCell, BenchReport, MachineInfo
from manyformer.bench.candidate import (
    BENCH_KINDS,
    BenchCandidate,
    BenchKind,
    BenchPrecision,
    BenchSetting,
    CandidateBench,
)
from manyformer.bench.clock import (
    TimedJob,
    is_noisy,
    load_average,
    load_warning,
    median_with_quartiles,
    paired_ratio,
    take_turns,
    time_job,
)
from manyformer.bench.memory import extra_memory
from manyformer.costs import count_flops
from manyformer.errors import UserError
from manyformer.system.devices import best_device, gpu_name

REFERENCE = "transformer-lm"
"""Dense softmax attention, the baseline of all ratios."""

NOISY_NOTE = "its times vary widely because of other load on the machine; ratios of paired runs are more reliable"

LENGTHS = (256, 512, 1024, 2048)


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
    load = load_average()
    notes = [warning] if (warning := load_warning()) else []
    benches = {candidate.label: CandidateBench(candidate, setting) for candidate in candidates}
    cells: list[BenchCell] = []
    for kind in dict.fromkeys(what):
        reasons_to_skip: dict[str, str] = {}
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
                reason = reasons_to_skip[label] = result
        cells[label] = BenchCell(label, kind, length, reason=reason)
    jobs = {label: warm_job.job for label, warm_job in warm_jobs.items()}
    expected_seconds = {label: warm_job.seconds for label, warm_job in warm_jobs.items()}
    times = take_turns(jobs, rounds, next(iter(benches.values())).setting.device, expected_seconds=expected_seconds)
    for label, warm_job in warm_jobs.items():
        seconds = median_with_quartiles(time / benches[label].runs_per_job(kind) for time in times[label])
        ratio: tuple[float | None, float | None, float | None] = (None, None, None)
        if against in times:
            ratio = paired_ratio(times[label], times[against])
        note = NOISY_NOTE if is_noisy(times[label]) else None
        cells[label] = BenchCell(label, kind, length, *seconds, *ratio, warm_job.memory, warm_job.flops, note)
    return list(cells.values())


def _prepare(candidate_bench: CandidateBench, kind: BenchKind, length: int, max_seconds: float) -> WarmJob | str:
    """Warm the job up and measure its memory and operations; a string is the reason why it cannot be run."""
    device = candidate_bench.setting.device
    try:
        job = candidate_bench.job(kind, length)
        flops = count_flops(job) // candidate_bench.runs_per_job(kind)
        seconds = time_job(job, device)
        memory = candidate_bench.state_bytes(length) if kind == "decode" else extra_memory(job, device)
    except (MemoryError, torch.OutOfMemoryError):
        return f"out of memory at length {length:,}"
    except RuntimeError as error:
        # torch has no exception type for a failed CPU allocation
        if "allocate memory" not in str(error):
            raise
        return f"out of memory at length {length:,}"
    if seconds > max_seconds:
        return f"too slow from length {length:,} on: one run takes {seconds:.0f} s, the limit is {max_seconds:.0f} s"
    return WarmJob(job, seconds, memory, flops)
