"""Greedy decoding with drafts against decoding token by token: tokens a step, and seconds, on one thread of a CPU.

    python benchmarks/draft_speed.py                                  # minutes, most of them training
    python benchmarks/draft_speed.py --steps 60 --dim 64 --depth 2 --new 16    # a minute: a model that knows little

A Llama with a chain of two layers ahead learns the standard library of Python by bytes, for a short time. Prompts are
windows of held-out text, decoded one at a time. The texts must be equal, or nothing is told; numbers are float64 for
the comparison of texts, and float32 for times. Every round decodes each way once; what counts is the ratio in a round.
"""

import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.benchmarks import paired_ratio, take_turns
from manyformer.nn.batches import CausalLMBatch

AHEAD = 2
ROWS, LENGTH = 8, 128
PROMPT = 48
WAYS: dict[str, dict[str, Any]] = {
    "token by token": {},
    "chain, 1 token": {"draft": 1},
    "chain, 2 tokens": {"draft": 2},
    "lookup, 4 tokens": {"draft": 4, "drafter": "lookup"},
}


def standard_library(size: int) -> Tensor:
    """The first bytes of the modules of the standard library, in the order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


def trained(text: Tensor, steps: int, dim: int, depth: int) -> Any:
    """A model after a short training on windows of the text."""
    torch.manual_seed(0)
    model: Any = mf.build("llama", vocab=256, dim=dim, depth=depth, heads=4, ahead="sequential", ahead_tokens=AHEAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,))
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = model.loss(CausalLMBatch(rows[:, :-1], rows[:, 1:]))
        mean = loss.total / loss.targets
        optimizer.zero_grad()
        (mean + loss.extra).backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {mean.item():.3f} nats of the next byte")
    return model.eval()


def contest(model: Any, prompts: list[list[int]], new: int, rounds: int) -> Iterator[str]:
    """A line for each way to decode: equal texts first, then seconds of some prompts."""
    exact = mf.generate(model.double(), prompts, max_new=new, stop_ids=(), batch=1)
    for name, options in WAYS.items():
        result = mf.generate(model, prompts, max_new=new, stop_ids=(), batch=1, **options)
        assert result.tokens == exact.tokens, f"{name}: the texts differ"
        if options:
            yield f"{name}: {len(prompts)} texts equal, {result.stats.drafts}"
    model.float()
    few = prompts[:8]
    steps = {
        name: lambda options=options: mf.generate(model, few, max_new=new, stop_ids=(), batch=1, **options)
        for name, options in WAYS.items()
    }
    times = take_turns(steps, rounds, frame.CPU)
    plain = next(iter(WAYS))
    for name in WAYS:
        rate = len(few) * new / statistics.median(times[name])
        yield f"{name}: {rate:.0f} tokens/s, {paired_ratio(times[plain], times[name])} times as fast"


def main() -> None:
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    arguments = parser.parse_args()
    frame.set_threads(1)
    text = standard_library(1_000_000)
    model = trained(text[:900_000], arguments.steps, arguments.dim, arguments.depth)
    held_out = text[900_000:]
    starts = torch.randint(len(held_out) - PROMPT, (arguments.prompts,)).tolist()
    prompts = [held_out[start : start + PROMPT].tolist() for start in starts]
    for line in contest(model, prompts, arguments.new, arguments.rounds):
        print(line)


if __name__ == "__main__":
    main()
