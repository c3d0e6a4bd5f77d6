"""Measure the constants of this machine one by one, and print `manyformer/costs.py` anew with them.

    python benchmarks/measure_costs.py                                     # all, about ten minutes on a quiet machine
    python benchmarks/measure_costs.py --only toeplitz_block sparse_call --rounds 3

A size or limit is measured by the jobs that it serves: every candidate is set in turn, and the fastest one wins if it
is faster than the value in use by more than `MARGIN`. A cost is the time of what it stands for over that of one (query,
key) pair. Fields without a measurement keep their values. New values are printed with the old ones beside them. They
may change the last digits of results, so that taking them is a change of its own.
"""

import dataclasses
import re
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import frame
import torch
from cost_jobs import HEADS, SWEEPS, WIDTH, Job, Sweep
from torch import Tensor

from manyformer import costs
from manyformer.bench import take_turns
from manyformer.ops.attention_with_lse import merge_lse
from manyformer.ops.softmax_attention import fused_attention

MARGIN, ROUNDS, TOKENS = 0.03, 5, 4096


def best_candidate(sweep: Sweep, used: Any, rounds: int) -> Any:
    """The candidate with the least median time, or the value in use where it is not clearly slower."""
    job = sweep.make_job()

    def with_value(value: Any) -> Job:
        def run() -> None:
            for place in sweep.places:
                place.put(value)
            job()

        return run

    try:
        times = take_turns({repr(value): with_value(value) for value in sweep.candidates}, rounds, frame.CPU)
    finally:
        for place in sweep.places:
            place.put(used)
    medians = {value: statistics.median(times[repr(value)]) for value in sweep.candidates}
    print("   ", ", ".join(f"{value}: {seconds * 1e3:.2f} ms" for value, seconds in medians.items()))
    fastest = min(medians, key=lambda value: medians[value])
    return fastest if medians[fastest] < medians[used] * (1 - MARGIN) else used


def seconds_of(rounds: int, **jobs: Job) -> dict[str, float]:
    """The median time of each job, measured in turns."""
    return {name: statistics.median(times) for name, times in take_turns(jobs, rounds, frame.CPU).items()}


def blocks_job(block: int, *, masked: bool = False, blocks: int | None = None) -> tuple[Job, int]:
    """Attention within blocks of tokens, forward and backward, and the number of its pairs."""
    blocks = TOKENS // block if blocks is None else blocks
    q, k, v = (torch.randn(blocks, HEADS, block, WIDTH, requires_grad=True) for _ in range(3))
    mask = torch.rand(blocks, 1, block, block) < 0.9 if masked else None
    upstream = torch.randn_like(q)
    scale = WIDTH**-0.5
    return (
        lambda: fused_attention(q, k, v, mask, causal=False, scale=scale).backward(upstream)
    ), blocks * HEADS * block * block


def in_pairs(rounds: int, job: Job) -> float:
    """The time of a job over that of one (query, key) pair in blocks of 128 tokens, measured in turns."""
    pairs_job, pairs = blocks_job(128)
    times = seconds_of(rounds, pairs=pairs_job, job=job)
    return times["job"] / times["pairs"] * pairs


def measure_pair_rates(rounds: int) -> tuple[tuple[int, float], ...]:
    blocks = [block for block, _ in costs.COSTS.pair_rates]
    times = seconds_of(rounds, **{str(block): blocks_job(block)[0] for block in blocks})
    per_pair = {block: times[str(block)] / block for block in blocks}
    return tuple((block, round(per_pair[block] / per_pair[max(blocks)], 2)) for block in blocks)


def measure_masked_pair(rounds: int) -> float:
    times = seconds_of(rounds, plain=blocks_job(128)[0], masked=blocks_job(128, masked=True)[0])
    return round(max(times["masked"] / times["plain"] - 1, 0.0), 2)


def measure_call(rounds: int) -> int:
    """The time of a call with a single token, in hundreds of pairs."""
    return round(in_pairs(rounds, blocks_job(1, blocks=1)[0]) / 100) * 100


def measure_merged_token(rounds: int) -> int:
    y, new = (torch.randn(HEADS, TOKENS, WIDTH) for _ in range(2))
    lse, new_lse = (torch.randn(HEADS, TOKENS) for _ in range(2))
    return round(in_pairs(rounds, lambda: merge_lse(y, lse, new, new_lse)) / (HEADS * TOKENS))


def measure_gathered_key(rounds: int) -> int:
    keys, index = torch.randn(HEADS, TOKENS, WIDTH), torch.randint(TOKENS, (TOKENS,))

    def gather_and_scatter() -> Tensor:
        return torch.zeros_like(keys).index_add_(1, index, keys[:, index])

    return round(in_pairs(rounds, gather_and_scatter) / (HEADS * TOKENS))


COSTS_IN_PAIRS: dict[str, Callable[[int], Any]] = {
    "attention_call": measure_call,
    "sparse_call": measure_call,
    "pair_rates": measure_pair_rates,
    "masked_pair": measure_masked_pair,
    "merged_token": measure_merged_token,
    "gathered_key": measure_gathered_key,
}


def rewritten(source: str, values: dict[str, Any], today: str) -> str:
    """The source of `costs.py` with these values and the day, the old value beside each that changed."""
    for name, value in values.items():
        if value != getattr(costs.COSTS, name):
            line = re.compile(rf'^(    {name}: .*? = measured\()(.*)(, "\w+", ")[\d-]+("\))$', re.MULTILINE)
            found = line.search(source)
            assert found is not None, name
            before, old, unit, after = found.groups()
            source = (
                f"{source[: found.start()]}{before}{value!r}{unit}{today}{after}  # was {old}{source[found.end() :]}"
            )
    return source


def main() -> None:
    measurable = [field.name for field in dataclasses.fields(costs.COSTS) if field.name in SWEEPS | COSTS_IN_PAIRS]
    parser = frame.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=measurable, default=measurable, metavar="FIELD")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    words = parser.parse_args()
    frame.settle(words.threads)
    torch.manual_seed(0)
    values = {}
    for name in words.only:
        used = getattr(costs.COSTS, name)
        print(f"{name}, used: {used}")
        sweep = SWEEPS.get(name)
        values[name] = (
            best_candidate(sweep, used, words.rounds) if sweep is not None else COSTS_IN_PAIRS[name](words.rounds)
        )
        print(f"    measured: {values[name]}")
    print(f"\nmeasured {len(values)} of {len(dataclasses.fields(costs.COSTS))} fields with {words.threads} threads\n")
    print(rewritten(Path(costs.__file__).read_text(encoding="utf-8"), values, f"{datetime.now(UTC):%Y-%m-%d}"))


if __name__ == "__main__":
    main()
