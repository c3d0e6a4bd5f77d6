"""Linear-time attention against released packages and our dense model: training steps, growth with length, decoding.

    python benchmarks/linear_speed.py                     # everything, about 25 minutes on two quiet cores
    python benchmarks/linear_speed.py --only step --rounds 3
    python benchmarks/linear_speed.py --only growth       # no other package is needed

Width 256, 4 heads, 4 layers. Every round runs each candidate once; what counts is the median over rounds of the ratio
within a round. Growth is the slope of logarithms from 1,024 tokens to 16,384.
"""

import argparse
import json
import math
import os
import statistics

# Before torch is loaded: see dense_speed.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.batches import MaskedBatch, TextBatch
from manyformer.bench import crowd, extra_memory, paired, take_turns
from manyformer.flops import count_flops
from manyformer.generate.bound import bind
from manyformer.generate.feeds import size_of
from manyformer.models import MaskedLM, Model

SIZE: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4}
FEATURES, SLOTS, BLIND = 256, 256, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
OURS = ("linear-transformer", "performer", "rfa", "linformer")
FLOPS_GOAL, TIME_GOAL, MEMORY_GOAL = 1.02, 1.2, 1.1
EARLY, LATE, STEADY_GOAL = 100, 8000, 1.10
CPU = torch.device("cpu")

Step = Callable[[], object]


class Contest(NamedTuple):
    """Candidates for one length, and by how much the first may be slower than which other."""

    what: str
    length: int
    makers: dict[str, Callable[[int], nn.Module]]
    goals: dict[str, float]


def main() -> None:
    """Measure, print a table, write JSON."""
    words = _arguments()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    if warning := crowd():
        print(f"warning: {warning}")
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "step": lambda: training(words.rounds),
        "growth": lambda: growth(words.rounds),
        "decode": decoding,
    }
    rows = []
    for name, part in parts.items():
        if words.only in (None, name):
            for row in part():
                rows.append(row)
                print(line(row), flush=True)
    found = {"threads": words.threads, "rounds": words.rounds, "torch": torch.__version__, "warning": warning}
    Path(words.out).write_text(json.dumps(found | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {words.out}")


def contests() -> list[Contest]:
    """What the goals are about."""
    linear, dense = ours("linear-transformer"), ours("transformer-lm")
    return [
        Contest(
            "causal Performer",
            2048,
            {"ours": ours("performer", features=FEATURES), "performer-pytorch": performer_pytorch},
            {"performer-pytorch": 0.06},
        ),
        *(
            Contest(
                "causal linear attention",
                length,
                {"ours": linear, "linear-attention-transformer": linear_attention_transformer, "our dense": dense},
                {"linear-attention-transformer": 1.05, "our dense": goal},
            )
            for length, goal in ((2048, 0.75), (8192, 0.35))
        ),
        *(
            Contest(
                "Linformer",
                length,
                {
                    "ours": ours("linformer", slots=SLOTS, sharing="heads", dropout=0.0, norm="pre"),
                    "linformer": linformer,
                },
                {"linformer": 1.0},
            )
            for length in (2048, 8192)
        ),
    ]


def training(rounds: int) -> Iterator[dict[str, Any]]:
    """Time and extra memory of a training step of one row."""
    for contest in contests():
        tokens = torch.randint(0, SIZE["vocab"], (1, contest.length))
        models = {name: make(contest.length) for name, make in contest.makers.items()}
        steps = {name: step_of(model, tokens) for name, model in models.items()}
        for step in steps.values():
            step()
        memory = {name: extra_memory(step, CPU) for name, step in steps.items()}
        times = take_turns(steps, rounds, CPU)
        for name in models:
            yield {
                "what": f"{contest.what}, {contest.length} tokens",
                "candidate": name,
                "seconds": statistics.median(times[name]),
                "ratio": paired(times["ours"], times[name])._asdict(),
                "goal": contest.goals.get(name),
                "memory": memory[name],
            }


def growth(rounds: int) -> Iterator[dict[str, Any]]:
    """How operations, time and memory of a training step grow with the length: slopes of their logarithms."""
    for recipe in OURS:
        more = {"features": FEATURES} if recipe == "performer" else {}
        if recipe == "linformer":
            more = {"slots": SLOTS, "sharing": "layers", "dropout": 0.0}
        jobs = {}
        for length in LENGTHS:
            model = ours(recipe, **more)(length)
            jobs[str(length)] = step_of(model, torch.randint(0, SIZE["vocab"], (1, length)))
        flops = [count_flops(job) for job in jobs.values()]
        memory = [extra_memory(job, CPU) or math.nan for job in jobs.values()]
        times = take_turns(jobs, max(3, rounds // 3), CPU)
        seconds = [statistics.median(times[name]) for name in jobs]
        for what, values, goal in (
            ("operations", flops, FLOPS_GOAL),
            ("seconds", seconds, TIME_GOAL),
            ("memory", memory, MEMORY_GOAL),
        ):
            yield {
                "what": f"growth from {LENGTHS[0]} to {LENGTHS[-1]} tokens",
                "candidate": f"{recipe}, {what}",
                "values": dict(zip(LENGTHS, values)),
                "slope": slope(values),
                "goal": goal,
            }


def slope(values: list[float]) -> float:
    """Of the straight line nearest to the points (log length, log value)."""
    x, y = ([math.log(v) for v in part] for part in (LENGTHS, values))
    mean = [statistics.fmean(part) for part in (x, y)]
    return sum((a - mean[0]) * (b - mean[1]) for a, b in zip(x, y)) / sum((a - mean[0]) ** 2 for a in x)


def decoding() -> Iterator[dict[str, Any]]:
    """Time of a token at two positions, in turns, and the size of the state."""
    for recipe in ("linear-transformer", "performer", "rfa"):
        model: Any = ours(recipe)(LATE).eval()
        with torch.inference_mode():
            following = bind(model)
            states = {}
            for position in (EARLY, LATE):
                state = model.start(1)
                states[position] = model(torch.randint(0, SIZE["vocab"], (1, position)), state=state).state
            times: dict[int, list[float]] = {EARLY: [], LATE: []}
            for _ in range(300):
                for position, state in states.items():
                    token = torch.randint(0, SIZE["vocab"], (1, 1))
                    begun = time.perf_counter()
                    following(token, state, None)
                    times[position].append(time.perf_counter() - begun)
        sizes = [size_of(state) for state in states.values()]
        assert sizes[0] == sizes[1], sizes
        yield {
            "what": f"a token at position {LATE} against one at {EARLY}",
            "candidate": recipe,
            "seconds": statistics.median(times[LATE]),
            "ratio": paired(times[LATE], times[EARLY])._asdict(),
            "goal": STEADY_GOAL,
            "memory": sizes[1],
        }


def line(row: dict[str, Any]) -> str:
    """One row for people, and whether its goal is reached."""
    start = f"{row['what']:<46}{row['candidate']:<32}"
    if "slope" in row:
        verdict = "reached" if row["slope"] <= row["goal"] else "MISSED"
        return f"{start}slope {row['slope']:.3f}, goal <= {row['goal']}: {verdict}"
    told = f"{start}{1e3 * row['seconds']:9.2f} ms"
    if row["memory"] is not None:
        told += f"{row['memory'] / 1e6:9.1f} MB"
    if row["goal"] is not None:
        ratio = row["ratio"]
        verdict = "reached" if ratio["median"] <= row["goal"] else "MISSED"
        told += f"   ratio {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        told += f", goal <= {row['goal']}: {verdict}"
    return told


def ours(recipe: str, **words: Any) -> Callable[[int], nn.Module]:
    """A recipe of ours, long enough."""

    def make(length: int) -> nn.Module:
        known = mf.recipes()[recipe].signature.parameters
        return mf.build(recipe, **SIZE, **words, **({"longest": length} if "longest" in known else {}))

    return make


def performer_pytorch(length: int) -> nn.Module:
    """`performer_pytorch.PerformerLM`, causal, with as many features, never drawn anew."""
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=SIZE["vocab"],
        max_seq_len=length,
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
        causal=True,
        nb_features=FEATURES,
        feature_redraw_interval=None,
    )


def linear_attention_transformer(length: int) -> nn.Module:
    """`linear_attention_transformer.LinearAttentionTransformerLM`, which does not see the last `BLIND` tokens."""
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
        max_seq_len=length,
        causal=True,
        blindspot_size=BLIND,
        use_axial_pos_emb=False,
    )


def linformer(length: int) -> nn.Module:
    """`linformer.LinformerLM`: keys and values each with a projection, for all heads."""
    from linformer import LinformerLM

    return LinformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        seq_len=length,
        depth=SIZE["depth"],
        k=SLOTS,
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
    )


def step_of(model: nn.Module, tokens: Tensor) -> Step:
    """One training step: loss of every token, gradients, fused AdamW. Same work for everybody."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    targets = tokens.roll(-1, 1)
    model.train()

    def loss() -> Tensor:
        if isinstance(model, Model):
            batch = MaskedBatch(tokens, targets, None) if isinstance(model, MaskedLM) else TextBatch(tokens, targets)
            found = model.loss(batch)
            return found.total / found.targets
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed [9]")
    parser.add_argument("--only", choices=("step", "growth", "decode"), help="one part of the measurement")
    parser.add_argument("--out", default="linear_speed.json", help="where the numbers go [linear_speed.json]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
