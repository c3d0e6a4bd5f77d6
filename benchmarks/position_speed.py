"""What positions cost: a training step with each of them against our own without, and against x-transformers.

    python benchmarks/position_speed.py                     # about 6 minutes on two quiet cores
    python benchmarks/position_speed.py --only rope --rounds 5

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round. Memory is told
for several lengths, with the slope of its logarithm against that of the length: 1 is linear.
"""

import argparse
import json
import math
import os

# Before torch is loaded: see dense_speed.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from peers import Size, step_of
from torch import nn

import manyformer as mf
from manyformer.bench import crowd, extra_memory, paired, take_turns
from manyformer.recipes.compose import PositionName

SIZE = Size(dim=256, depth=4, heads=4, vocab=256, longest=8192)
BATCH, LENGTH = 1, 2048
LENGTHS = (1024, 2048, 4096, 8192)
MOST: dict[str, float | None] = {"rope": 1.10, "alibi": 1.15, "t5": 1.35, "shaw": 1.5, "xl": None, "da": None}
"""How many times the step without positions each may take; None where nothing is demanded."""

PEERS: dict[str, dict[str, Any]] = {
    "rope": {"rotary_pos_emb": True, "attn_flash": True},
    "alibi": {"alibi_pos_bias": True, "attn_flash": True},
    "t5": {"rel_pos_bias": True},
}
"""The same positions in x-transformers, which the step must not take more than 0.7 times of."""

PEER_MOST, SLOPE_MOST = 0.7, 1.15
CPU = torch.device("cpu")


def main() -> None:
    """Measure, print, write JSON."""
    words = _arguments()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    warning = crowd()
    if warning:
        print(f"warning: {warning}")
    known = [name for name in MOST if name in get_args(PositionName) and words.only in (None, name)]
    rows = list(steps(known, words.rounds))
    for row in rows:
        print(row["line"])
    slopes = [] if words.no_memory else list(memory(known))
    for row in slopes:
        print(row["line"])
    found = {"threads": words.threads, "torch": torch.__version__, "warning": warning, "steps": rows, "memory": slopes}
    Path(words.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {words.out}")


def steps(names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Time of a training step."""
    tokens = torch.randint(0, SIZE.vocab, (BATCH, LENGTH))
    jobs = {name: step_of("ours", ours(name), tokens) for name in ("none", *names)}
    jobs |= {f"x-{name}": step_of("x-transformers", peer(name), tokens) for name in names if name in PEERS}
    for job in jobs.values():
        job()
    times = take_turns(jobs, rounds, CPU)
    for name in names:
        ratio = paired(times[name], times["none"])
        goal = MOST[name]
        line = f"{name:<6} {1e3 * sorted(times[name])[rounds // 2]:7.1f} ms, {ratio.median:.3f} of none "
        line += f"({ratio.low:.3f} to {ratio.high:.3f})"
        if goal is not None:
            line += f", goal <= {goal}: {'reached' if ratio.median <= goal else 'MISSED'}"
        row: dict[str, Any] = {"position": name, "by_none": ratio._asdict(), "goal": goal}
        if name in PEERS:
            against = paired(times[name], times[f"x-{name}"])
            verdict = "reached" if against.median <= PEER_MOST else "MISSED"
            line += f"; {against.median:.2f} of x-transformers, goal <= {PEER_MOST}: {verdict}"
            row |= {"by_peer": against._asdict(), "peer_goal": PEER_MOST}
        yield {**row, "line": line}


def memory(names: list[str]) -> Iterator[dict[str, Any]]:
    """Extra memory of a training step against length."""
    for name in ("none", *names):
        model, found = ours(name), []
        for length in LENGTHS:
            job = step_of("ours", model, torch.randint(0, SIZE.vocab, (1, length)))
            job()
            found.append(min(extra_memory(job, CPU) or 0 for _ in range(3)))
        slope = _slope(LENGTHS, found)
        verdict = "reached" if slope <= SLOPE_MOST else "MISSED"
        sizes = ", ".join(f"{size / 1e6:.0f} MB" for size in found)
        line = f"{name:<6} memory at {LENGTHS}: {sizes}; slope {slope:.2f}, goal <= {SLOPE_MOST}: {verdict}"
        yield {"position": name, "bytes": found, "slope": slope, "line": line}


def ours(position: str) -> nn.Module:
    """`compose` with this position; what needs a length is told the longest."""
    return mf.build("compose", **SIZE._asdict(), position=position)


def peer(position: str) -> nn.Module:
    """x-transformers with the same position."""
    from x_transformers import Decoder, TransformerWrapper

    width = SIZE.dim // SIZE.heads
    layers = Decoder(dim=SIZE.dim, depth=SIZE.depth, heads=SIZE.heads, attn_dim_head=width, **PEERS[position])
    return TransformerWrapper(
        num_tokens=SIZE.vocab, max_seq_len=SIZE.longest, use_abs_pos_emb=False, attn_layers=layers
    )


def _slope(lengths: tuple[int, ...], sizes: list[int]) -> float:
    """Of the logarithms, by least squares."""
    xs, ys = [math.log(n) for n in lengths], [math.log(max(1, size)) for size in sizes]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=15, help="how often everything is timed [15]")
    parser.add_argument("--only", choices=list(MOST), help="one position")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    parser.add_argument("--out", default="position_speed.json", help="where the numbers go [position_speed.json]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
