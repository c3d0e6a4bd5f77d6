"""Benchmarks: time and memory of recipes against length, measured in interleaved rounds.

`bench(["compose", ...], lengths)` returns a `BenchReport` with tables (`lines`), `to_json`, `to_csv`; `write_report`
saves it. The functions that it is made of compare any jobs on a busy machine: `take_turns`, `paired_ratio`,
`extra_memory`, `LargestTensorMode`."""

from manyformer.bench.bench import bench
from manyformer.bench.bench_report import BenchCell, BenchReport, MachineInfo, write_report
from manyformer.bench.candidate import BENCH_KINDS, BenchCandidate, BenchPrecision
from manyformer.bench.clock import load_warning, median_with_quartiles, paired_ratio, take_turns, time_job
from manyformer.bench.memory import LargestTensorMode, extra_memory

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
