"""Benchmarks: time and memory of recipes against length, measured in interleaved rounds.

`bench(["compose", ...], lengths)` returns a `BenchReport` with tables (`lines`), `to_json`, `to_csv`; `write_report`
saves it. The functions that it is made of compare any jobs on a busy machine: `take_turns`, `paired_ratio`,
`extra_memory`, `LargestTensorMode`."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.benchmarks.bench import BenchPrecision, bench
    from manyformer.analysis.benchmarks.bench_report import (
        BENCH_KINDS,
        BenchCandidate,
        BenchCell,
        BenchReport,
        MachineInfo,
        write_report,
    )
    from manyformer.analysis.benchmarks.measuring import (
        LargestTensorMode,
        extra_memory,
        load_warning,
        median_with_quartiles,
        paired_ratio,
        take_turns,
        time_job,
    )

_MODULES = {
    "BENCH_KINDS": "manyformer.analysis.benchmarks.bench_report",
    "BenchCandidate": "manyformer.analysis.benchmarks.bench_report",
    "BenchCell": "manyformer.analysis.benchmarks.bench_report",
    "BenchPrecision": "manyformer.analysis.benchmarks.bench",
    "BenchReport": "manyformer.analysis.benchmarks.bench_report",
    "LargestTensorMode": "manyformer.analysis.benchmarks.measuring",
    "MachineInfo": "manyformer.analysis.benchmarks.bench_report",
    "bench": "manyformer.analysis.benchmarks.bench",
    "extra_memory": "manyformer.analysis.benchmarks.measuring",
    "load_warning": "manyformer.analysis.benchmarks.measuring",
    "median_with_quartiles": "manyformer.analysis.benchmarks.measuring",
    "paired_ratio": "manyformer.analysis.benchmarks.measuring",
    "take_turns": "manyformer.analysis.benchmarks.measuring",
    "time_job": "manyformer.analysis.benchmarks.measuring",
    "write_report": "manyformer.analysis.benchmarks.bench_report",
}

__all__ = [
    "BENCH_KINDS",
    "BenchCandidate",
    "BenchCell",
    "BenchPrecision",
    "BenchReport",
    "LargestTensorMode",
    "MachineInfo",
    "bench",
    "extra_memory",
    "load_warning",
    "median_with_quartiles",
    "paired_ratio",
    "take_turns",
    "time_job",
    "write_report",
]


_offer_names(__name__, _MODULES)
