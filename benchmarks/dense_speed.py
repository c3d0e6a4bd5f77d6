"""Dense attention against released packages: training step, its memory, and decoding, all in one interleaved run.

    python benchmarks/dense_speed.py                    # the full measurement, about 5 minutes on two quiet cores
    python benchmarks/dense_speed.py --rounds 3 --tokens 32   # a glance

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round.
"""

import argparse
import json
import os
import statistics

# Before torch is loaded: threads that wait for each other then sleep instead of spinning, for everybody alike. With a
# busy neighbour, spinning makes two threads many times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import MODELS, Size, step_of, writer_of
from torch import nn

from manyformer.bench import crowd, extra_memory, paired, take_turns

STEP = Size(dim=256, depth=4, heads=4, vocab=256, longest=2048)
SHAPES = ((4, 512), (1, 2048))
STEP_GOALS = {"x-transformers": 1.0, "GPT-2": 0.9}

WRITE = Size(dim=384, depth=6, heads=6, vocab=256, longest=1024)
PROMPT = 16
WRITE_GOAL = 1.6

MEMORY_RUNS = 3
# the allocator rounds and splits: less than this share is no difference
MEMORY_SLACK = 1.02

CPU = torch.device("cpu")


def main() -> None:
    """Measure, print a table, write JSON."""
    words = _arguments()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    warning = crowd()
    if warning:
        print(f"warning: {warning}")
    rows: list[dict[str, Any]] = []
    for batch, length in SHAPES if words.only in (None, "step") else ():
        rows += training(batch, length, words.rounds)
    if words.only in (None, "decode"):
        rows += decoding(words.tokens, words.rounds)
    for line in table(rows):
        print(line)
    found = {
        "threads": words.threads,
        "rounds": words.rounds,
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "warning": warning,
        "rows": rows,
    }
    Path(words.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {words.out}")


def training(batch: int, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time and extra memory of a training step."""
    models = _models(STEP)
    tokens = torch.randint(0, STEP.vocab, (batch, length))
    steps = {name: step_of(name, model, tokens) for name, model in models.items()}
    for step in steps.values():
        step()
    memory = {name: _memory(step) for name, step in steps.items()}
    times = take_turns(steps, rounds, CPU)
    what = f"training step, batch {batch} x {length}"
    for name, model in models.items():
        yield {
            "what": what,
            "candidate": name,
            "parameters": sum(value.numel() for value in model.parameters()),
            "seconds": statistics.median(times[name]),
            "ours_by_theirs": paired(times["ours"], times[name])._asdict(),
            "goal": STEP_GOALS.get(name),
            "memory": memory[name],
        }


def decoding(new: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time of writing `new` tokens, one row."""
    models = _models(WRITE)
    prompt = torch.randint(0, WRITE.vocab, (1, PROMPT))
    writers = {name: writer_of(name, model, prompt, new) for name, model in models.items()}
    for name, write in writers.items():
        written = write().shape[-1]
        assert written == new, f"{name} wrote {written} tokens"
    times = take_turns(writers, rounds, CPU)
    for name, model in models.items():
        # how many times as many tokens a second as they
        ratio = paired(times[name], times["ours"])
        yield {
            "what": f"decoding, {new} tokens after {PROMPT}",
            "candidate": name,
            "parameters": sum(value.numel() for value in model.parameters()),
            "tokens_per_second": new / statistics.median(times[name]),
            "ours_by_theirs": ratio._asdict(),
            "goal": None if name == "ours" else WRITE_GOAL,
        }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a row, and whether its goal is reached."""
    what = None
    for row in rows:
        if row["what"] != what:
            what = row["what"]
            mine = row
            yield f"\n{what}"
        ratio, goal = row["ours_by_theirs"], row["goal"]
        steps = "seconds" in row
        speed = f"{1e3 * row['seconds']:8.1f} ms" if steps else f"{row['tokens_per_second']:8.1f} tokens/s"
        line = f"  {row['candidate']:<15}{row['parameters'] / 1e6:5.1f} M{speed}"
        if steps and row["memory"] is not None:
            line += f"{row['memory'] / 1e6:8.0f} MB"
        if goal is not None:
            good = ratio["median"] <= goal if steps else ratio["median"] >= goal
            verdict = "reached" if good else "MISSED"
            line += f"   ours/theirs {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}), "
            line += f"goal {'<=' if steps else '>='} {goal}: {verdict}"
            if steps and row["memory"] is not None:
                less = mine["memory"] <= MEMORY_SLACK * row["memory"]
                line += f"; memory {mine['memory'] / row['memory']:.2f}: {'reached' if less else 'MISSED'}"
        yield line


def _models(size: Size) -> dict[str, nn.Module]:
    return {name: make(size) for name, make in MODELS.items()}


def _memory(job: Callable[[], None]) -> int | None:
    found = [extra_memory(job, CPU) for _ in range(MEMORY_RUNS)]
    known = [number for number in found if number is not None]
    return int(statistics.median(known)) if known else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=15, help="how often everything is timed [15]")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens when decoding [128]")
    parser.add_argument("--only", choices=("step", "decode"), help="one half of the measurement")
    parser.add_argument("--out", default="dense_speed.json", help="where the numbers go [dense_speed.json]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
