"""Benchmarks: time and memory of recipes against length, measured in interleaved rounds.

`bench(["compose", ...], lengths)` returns a `BenchReport` with tables (`lines`), `to_json`, `to_csv`; `write_report`
saves it. The functions that it is made of compare any jobs on a busy machine: `take_turns`, `paired_ratio`,
`extra_memory`, `LargestTensorMode`."""

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
