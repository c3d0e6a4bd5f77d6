"""Benchmarks: time and memory of recipes against length, measured in interleaved rounds.

`bench(["compose", ...], lengths)` returns a `BenchReport` with tables (`lines`), `to_json`, `to_csv` and `save`. The
functions that it is made of compare any jobs on a busy machine: `take_turns`, `paired_ratio`, `extra_memory`,
`LargestTensorMode`."""

from manyformer.bench.bench import LENGTHS, REFERENCE, bench
from manyformer.bench.bench_report import BenchCell, BenchReport, MachineInfo
from manyformer.bench.candidate import BENCH_KINDS, SIZES, BenchCandidate, BenchKind, BenchPrecision
from manyformer.bench.clock import (
    MedianWithQuartiles,
    load_warning,
    median_with_quartiles,
    paired_ratio,
    take_turns,
    time_job,
)
from manyformer.bench.largest_tensor import LargestTensorMode
from manyformer.bench.memory import extra_memory
from manyformer.flops import FLOP_CONVENTION, count_flops

__all__ = [
    "BENCH_KINDS",
    "FLOP_CONVENTION",
    "LENGTHS",
    "REFERENCE",
    "SIZES",
    "BenchCandidate",
    "BenchCell",
    "BenchKind",
    "BenchPrecision",
    "BenchReport",
    "LargestTensorMode",
    "MachineInfo",
    "MedianWithQuartiles",
    "bench",
    "count_flops",
    "extra_memory",
    "load_warning",
    "median_with_quartiles",
    "paired_ratio",
    "take_turns",
    "time_job",
]
