"""`bench`: time, memory and operations of recipes against length."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from manyformer.bench.bench_report import BenchCell, BenchReport, MachineInfo
from manyformer.bench.candidate import WHATS, BenchCandidate, BenchKind, BenchPrecision, BenchSetting, CandidateBench
from manyformer.bench.clock import TimedJob, is_noisy, load_warning, middle, once, paired, take_turns
from manyformer.bench.memory import extra_memory
from manyformer.errors import UserError
from manyformer.flops import count_flops

REFERENCE = "transformer-lm"
"""Dense softmax attention, which everything else has to beat."""

DISTURBED = "its times spread widely: other work disturbed them; ratios are of paired runs and hold better"

LENGTHS = (256, 512, 1024, 2048)


class WarmJob(NamedTuple):
    """A job that has run once: what it needs and how long it took."""

    job: TimedJob
    seconds: float
    share: int
    memory: int | None
    flops: int | None


def bench(
    recipes: Sequence[str | BenchCandidate],
    lengths: Iterable[int] = LENGTHS,
    *,
    what: Iterable[BenchKind] = WHATS,
    against: str | None = REFERENCE,
    keywords: Mapping[str, Any] | None = None,
    batch: int = 1,
    rounds: int = 7,
    patience: float = 60.0,
    device: str | None = None,
    precision: BenchPrecision = "auto",
    seed: int = 0,
    each: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure recipes side by side: forward pass, training step and decoding at each length.

    All are built with the same sizes (`SIZES`, changed by `keywords`; what a recipe does not know is left out) and
    take turns; `against` is measured as well and is what ratios refer to (None: no reference). A candidate that needs
    more than `patience` seconds for one run is not asked for greater lengths. `each` hears what comes next. Raises
    UserError.
    """
    candidates = _candidates(recipes, against)
    sizes = _checked(lengths, batch, rounds, what)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setting = BenchSetting(place, batch, max(sizes), precision, seed, dict(keywords or {}))
    before = _load()
    notes = [warning] if (warning := load_warning()) else []
    benches = {candidate.label: CandidateBench(candidate, setting) for candidate in candidates}
    cells: list[BenchCell] = []
    for kind in dict.fromkeys(what):
        slow: dict[str, str] = {}
        for length in sizes:
            each(f"{kind}, length {length:,}")
            cells += _measure(benches, kind, length, against=against, rounds=rounds, patience=patience, slow=slow)
    machine = MachineInfo(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        precision=next(iter(benches.values())).precision,
        batch=batch,
        rounds=rounds,
        load=before,
    )
    return BenchReport(tuple(candidates), against, machine, tuple(cells), tuple(notes))


def _candidates(recipes: Sequence[str | BenchCandidate], against: str | None) -> list[BenchCandidate]:
    found = [BenchCandidate(one, one) if isinstance(one, str) else one for one in recipes]
    if not found:
        raise UserError("there is nothing to measure: give at least one recipe")
    labels = [candidate.label for candidate in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"'{twice}' is there twice: give the candidates different labels")
    if against is not None and against not in labels:
        found = [BenchCandidate(against, against), *found]
    return found


def _checked(lengths: Iterable[int], batch: int, rounds: int, what: Iterable[BenchKind]) -> list[int]:
    sizes = sorted(set(lengths))
    if not sizes or sizes[0] < 1:
        raise UserError(f"lengths must be 1 or more tokens, got {sizes}")
    for name, value in (("batch", batch), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if unknown := set(what) - set(WHATS):
        raise UserError(f"what ('{min(unknown)}') must be among {', '.join(WHATS)}")
    return sizes


def _measure(
    benches: Mapping[str, CandidateBench],
    what: BenchKind,
    length: int,
    *,
    against: str | None,
    rounds: int,
    patience: float,
    slow: dict[str, str],
) -> list[BenchCell]:
    """One cell for each candidate; `slow` collects those that need no longer lengths."""
    cells: dict[str, BenchCell] = {}
    ready: dict[str, WarmJob] = {}
    for label, one in benches.items():
        why = slow.get(label) or one.why_not(what)
        if why is None:
            result = _prepare(one, what, length, patience=patience)
            if isinstance(result, WarmJob):
                ready[label] = result
            else:
                why = slow[label] = result
        cells[label] = BenchCell(label, what, length, why=why)
    jobs = {label: one.job for label, one in ready.items()}
    about = {label: one.seconds for label, one in ready.items()}
    times = take_turns(jobs, rounds, next(iter(benches.values())).setting.device, about=about)
    for label, done in ready.items():
        cells[label] = _cell(cells[label], done, times[label], times.get(against or ""))
    return list(cells.values())


def _prepare(one: CandidateBench, what: BenchKind, length: int, *, patience: float) -> WarmJob | str:
    """Run the job for the first times, or say why it cannot be run."""
    device = one.setting.device
    try:
        job = one.job(what, length)
        flops = count_flops(job) // one.runs_per_job(what)
        seconds = once(job, device)
        memory = one.state_bytes(length) if what == "decode" else extra_memory(job, device)
    except (MemoryError, torch.OutOfMemoryError):
        return f"out of memory at length {length:,}"
    except RuntimeError as error:
        # torch has no type of its own for an allocation that fails on a CPU
        if "allocate memory" not in str(error):
            raise
        return f"out of memory at length {length:,}"
    if seconds > patience:
        return f"too slow from length {length:,} on: one run takes {seconds:.0f} s, the patience is {patience:.0f} s"
    return WarmJob(job, seconds, one.runs_per_job(what), memory, flops)


def _cell(cell: BenchCell, ready: WarmJob, times: list[float], reference: list[float] | None) -> BenchCell:
    seconds = middle(time / ready.share for time in times)
    ratio = None if reference is None else paired(times, reference)
    return replace(
        cell,
        seconds=seconds.median,
        lower_quartile=seconds.low,
        upper_quartile=seconds.high,
        ratio=None if ratio is None else ratio.median,
        ratio_low=None if ratio is None else ratio.low,
        ratio_high=None if ratio is None else ratio.high,
        memory=ready.memory,
        flops=ready.flops,
        why=DISTURBED if is_noisy(times) else None,
    )


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
