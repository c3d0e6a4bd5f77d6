"""Memory of a training step against length: no recipe whose memory should grow linearly grows faster."""

from functools import partial

import torch
from frame import log_slope

import manyformer as mf
from gpu_parts.outcome import Item, Outcome, Setting, judged
from gpu_parts.step_speed import step_of
from manyformer.analysis.benchmarks import extra_memory

RECIPES = ("transformer-lm", "alibi", "longformer-lm", "linear-transformer")
MAX_SLOPE = 1.1


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe."""
    return {name: partial(growth, setting, name) for name in (RECIPES[:1] if setting.tiny else RECIPES)}


def growth(setting: Setting, recipe: str) -> Outcome:
    """Extra bytes of a step at each length, and how fast they grow."""
    lengths = [32, 64] if setting.tiny else [1024, 2048, 4096, 8192]
    dim, depth = (32, 2) if setting.tiny else (512, 6)
    sizes = {"vocab": 256, "dim": dim, "depth": depth, "heads": dim // 16 if setting.tiny else 8}
    model = mf.build(recipe, max_length=max(lengths), **sizes).to(setting.device)
    extra = []
    for length in lengths:
        step = step_of(setting, model, torch.randint(256, (1, length), device=setting.device))
        step()
        size = extra_memory(step, setting.device)
        if size is None:
            return Outcome("not run", "this machine cannot tell the memory of a process")
        extra.append(max(1.0, float(size)))
    paths = [*mf.explain(model, torch.randint(256, (1, lengths[-1]), device=setting.device)).values()]
    numbers = {f"{length} tokens, MB": size / 1e6 for length, size in zip(lengths, extra)}
    numbers["slope"] = log_slope(lengths, extra)
    misses = (
        [f"it grows with length^{numbers['slope']:.2f}"] if setting.has_goals and numbers["slope"] > MAX_SLOPE else []
    )
    return judged(f"a step of one row, d {dim}, {depth} layers", misses, numbers, paths)
