"""Greedy decoding of one row with everybody's own `generate`."""

import statistics
from functools import partial

import torch
from peers import MODELS, Size, writer_of

from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.bench import paired_ratio, take_turns

ROUNDS = 3
GOAL = 1 / 1.6
"""Our time as a share of theirs."""


def items(setting: Setting) -> dict[str, Item]:
    """One row at a time."""
    return {"one row": partial(contest, setting)}


def contest(setting: Setting) -> Outcome:
    """Tokens a second of every installed model of one size."""
    size = Size(32, 2, 2, 64, 64) if setting.tiny else Size(768, 12, 12, 32000, 1024)
    new = 8 if setting.tiny else 128
    prompt = torch.randint(size.vocab, (1, 16), device=setting.device)
    jobs, absent = {}, []
    for name, make in MODELS.items():
        try:
            job = writer_of(name, make(size).to(setting.device), prompt, new)
        except ImportError as error:
            absent.append(f"{name} is not installed ({error.name})")
            continue
        if (written := job().shape[-1]) != new:
            absent.append(f"{name} wrote {written} tokens instead of {new}")
            continue
        jobs[name] = job
    times = take_turns(jobs, ROUNDS, setting.device)
    numbers = {f"{name}, tokens/s": new / statistics.median(each) for name, each in times.items()}
    ratios = {name: paired_ratio(times["ours"], each).median for name, each in times.items() if name != "ours"}
    numbers |= {f"ours over {name}": ratio for name, ratio in ratios.items()}
    misses = [f"{ratio:.2f} of {name}'s time, goal {GOAL:.3f}" for name, ratio in ratios.items() if ratio > GOAL]
    sentence = f"{new} tokens after 16, d {size.dim}, {size.depth} layers"
    return judged("; ".join([sentence, *absent]), misses if setting.has_goals else [], numbers)
