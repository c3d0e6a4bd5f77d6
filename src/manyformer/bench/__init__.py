"""Benchmarks: what recipes cost in time and memory against length, measured side by side.

`bench(["compose", ...], lengths)` returns a `BenchReport` with tables (`lines`), `to_json`, `to_csv` and `save`. The
parts below it serve anybody who compares jobs on a machine that is not quiet: `take_turns`, `paired`, `extra_memory`,
`LargestTensorMode`."""

from manyformer.bench.bench import LENGTHS, REFERENCE, bench
from manyformer.bench.bench_report import BenchCell, BenchReport, MachineInfo
from manyformer.bench.candidate import SIZES, WHATS, BenchCandidate, BenchKind, BenchPrecision
from manyformer.bench.clock import MedianWithQuartiles, load_warning, middle, once, paired, take_turns
from manyformer.bench.largest_tensor import LargestTensorMode
from manyformer.bench.memory import extra_memory
from manyformer.flops import FLOP_CONVENTION, count_flops

__all__ = [
    "FLOP_CONVENTION",
    "LENGTHS",
    "REFERENCE",
    "SIZES",
    "WHATS",
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
    "middle",
    "once",
    "paired",
    "take_turns",
]
