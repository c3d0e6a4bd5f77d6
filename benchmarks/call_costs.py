"""What calls of attention cost on this CPU, in (query, key) pairs of one head, and the constants that hold it."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from cost_jobs import Place
from torch import Tensor

from manyformer.analysis.benchmarks.measuring import TimedJob, take_turns
from manyformer.nn.ops.attention_with_lse import merge_lse
from manyformer.nn.ops.softmax_attention import fused_attention
from manyformer.nn.softmax import softmax_kernel, sparse_plan

CPU = torch.device("cpu")
HEADS, WIDTH, TOKENS = 4, 64, 4096


def seconds_of(rounds: int, **jobs: TimedJob) -> dict[str, float]:
    """The median time of each job, measured in turns."""
    return {name: statistics.median(times) for name, times in take_turns(jobs, rounds, CPU).items()}


def blocks_job(block: int, *, masked: bool = False, blocks: int | None = None) -> tuple[TimedJob, int]:
    """Attention within blocks of tokens, forward and backward, and the number of its pairs."""
    blocks = TOKENS // block if blocks is None else blocks
    q, k, v = (torch.randn(blocks, HEADS, block, WIDTH, requires_grad=True) for _ in range(3))
    mask = torch.rand(blocks, 1, block, block) < 0.9 if masked else None
    upstream = torch.randn_like(q)
    scale, pairs = WIDTH**-0.5, blocks * HEADS * block * block

    def job() -> None:
        fused_attention(q, k, v, mask, causal=False, scale=scale).backward(upstream)  # type: ignore[no-untyped-call]

    return job, pairs


def in_pairs(rounds: int, job: TimedJob) -> float:
    """The time of a job over that of one (query, key) pair in blocks of 128 tokens, measured in turns."""
    pairs_job, pairs = blocks_job(128)
    times = seconds_of(rounds, pairs=pairs_job, job=job)
    return times["job"] / times["pairs"] * pairs


def measure_pair_rates(rounds: int) -> dict[int, float]:
    blocks = list(sparse_plan.PAIR_RATES)
    times = seconds_of(rounds, **{str(block): blocks_job(block)[0] for block in blocks})
    per_pair = {block: times[str(block)] / block for block in blocks}
    return {block: round(per_pair[block] / per_pair[max(blocks)], 2) for block in blocks}


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


CALL_COSTS: list[tuple[Place, Callable[[int], Any]]] = [
    (Place(softmax_kernel, "ATTENTION_CALL"), measure_call),
    (Place(sparse_plan, "CALL"), measure_call),
    (Place(sparse_plan, "PAIR_RATES"), measure_pair_rates),
    (Place(sparse_plan, "MASKED_PAIR"), measure_masked_pair),
    (Place(sparse_plan, "MERGED_TOKEN"), measure_merged_token),
    (Place(sparse_plan, "GATHERED_KEY"), measure_gathered_key),
]
