"""Benchmarks: what recipes cost in time and memory against length, measured side by side.

`bench(["compose", ...], lengths)` returns a `Report` with tables (`lines`), `to_json`, `to_csv` and `save`. The parts
below it serve anybody who compares jobs on a machine that is not quiet: `take_turns`, `paired`, `extra_memory`,
`Largest`.
"""

from manyformer.bench.clock import Middle, crowd, middle, once, paired, take_turns
from manyformer.bench.largest import Largest
from manyformer.bench.memory import extra_memory
from manyformer.bench.report import Cell, Machine, Report
from manyformer.bench.verb import LENGTHS, REFERENCE, bench
from manyformer.bench.work import SIZES, WHATS, Candidate, Precision, What
from manyformer.flops import COUNTED, count_flops

__all__ = [
    "COUNTED",
    "LENGTHS",
    "REFERENCE",
    "SIZES",
    "WHATS",
    "Candidate",
    "Cell",
    "Largest",
    "Machine",
    "Middle",
    "Precision",
    "Report",
    "What",
    "bench",
    "count_flops",
    "crowd",
    "extra_memory",
    "middle",
    "once",
    "paired",
    "take_turns",
]
