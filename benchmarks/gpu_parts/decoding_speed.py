"""Greedy decoding with everybody's own `generate`, and ours by static steps that are captured as CUDA graphs."""

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peers import MODELS, Size, writer_of

import manyformer as mf
from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.analysis.benchmarks import paired_ratio, take_turns
from manyformer.analysis.own_models import build_tiny
from manyformer.inference.decoding_options import StepPath
from manyformer.inference.generate.result import GenerationResult
from manyformer.models import Model

ROUNDS = 3
GOAL = 1 / 1.6
"""Our time as a share of theirs."""
GRAPH_GOAL = 1.0
"""The time of captured steps as a share of that of eager ones."""
SAME_TOKENS = 0.9
"""The share of equal tokens from which on differences may be ties of random weights in bfloat16."""
GRAPH_RECIPES = ("transformer-lm", "gated-deltanet", "llama", "alibi", "longformer-lm", "linear-transformer", "mamba-2")


def items(setting: Setting) -> dict[str, Item]:
    """One row at a time against peers, then eager steps against graphs."""
    graphs = {
        f"graph {recipe}, {rows} rows": partial(eager_and_graph, setting, recipe, rows)
        for recipe in (GRAPH_RECIPES[:2] if setting.tiny else GRAPH_RECIPES)
        for rows in (1, 16)
    }
    return {"one row": partial(contest, setting)} | graphs


def eager_and_graph(setting: Setting, recipe: str, rows: int) -> Outcome:
    """Whether both write the same tokens, the speed of each, and that no graph was given up; with beams, too."""
    model, new = decoder_of(setting, recipe), 24 if setting.tiny else 256
    prompts = torch.randint(1, model.vocab, (rows, 16), device=setting.device)
    path: StepPath = "graph" if setting.on_gpu else "static"
    lengths = [prompt[: 16 - index % 8].tolist() for index, prompt in enumerate(prompts)]

    def write(step_path: StepPath, **options: Any) -> GenerationResult:
        options = {"max_new": new, "stop_ids": (), "batch": rows, "step_path": step_path} | options
        return mf.generate(model, lengths, **options)

    written = {cache: write(cache) for cache in ("eager", path)}
    beams = {cache: write(cache, beam=2, max_new=12).tokens for cache in ("eager", path)}
    shares = [equal_share(results["eager"], results[path]) for results in (tokens_of(written), beams)]
    misses = [f"{share:.1%} of the tokens are those of eager steps" for share in shares if share < SAME_TOKENS]
    times = take_turns({cache: partial(write, cache) for cache in written}, ROUNDS, setting.device)
    numbers = {f"{cache}, tokens/s": rows * new / statistics.median(seconds) for cache, seconds in times.items()}
    numbers[f"{path} over eager"] = ratio = paired_ratio(times[path], times["eager"]).median
    if setting.has_goals and ratio > GRAPH_GOAL:
        misses.append(f"{ratio:.2f} of eager steps' time, goal {GRAPH_GOAL}")
    sentence = f"{new} tokens after 9 to 16, the same with beams"
    return judged(sentence, misses, numbers, [f"{cache}: {result.stats.cache}" for cache, result in written.items()])


def decoder_of(setting: Setting, recipe: str) -> Model:
    """A model of about 100 M parameters, in bfloat16 on a GPU."""
    keywords: dict[str, Any] = {"dim": 768, "depth": 12, "vocab": 32000}
    model = build_tiny(recipe, {}, 0) if setting.tiny else mf.build(recipe, **keywords)
    return model.to(setting.device, torch.bfloat16 if setting.on_gpu else torch.float32).eval()


def tokens_of(written: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """The tokens of each result."""
    return {name: result.tokens for name, result in written.items()}


def equal_share(left: list[list[int]], right: list[list[int]]) -> float:
    """The share of places with equal tokens, of texts as long."""
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


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
    numbers = {f"{name}, tokens/s": new / statistics.median(seconds) for name, seconds in times.items()}
    ratios = {name: paired_ratio(times["ours"], seconds).median for name, seconds in times.items() if name != "ours"}
    numbers |= {f"ours over {name}": ratio for name, ratio in ratios.items()}
    misses = [f"{ratio:.2f} of {name}'s time, goal {GOAL:.3f}" for name, ratio in ratios.items() if ratio > GOAL]
    sentence = f"{new} tokens after 16, d {size.dim}, {size.depth} layers"
    return judged("; ".join([sentence, *absent]), misses if setting.has_goals else [], numbers)
