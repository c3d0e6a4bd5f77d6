"""Where a training step of each recipe waits for the GPU, by torch's own debug mode."""

import collections
import traceback
import warnings
from functools import partial
from typing import Any

import torch

import manyformer as mf
from gpu_parts.correctness import inputs_on, prepared
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged
from manyformer.nn.batches import to_device
from manyformer.recipes.parts.registry import task_of

MOST_PLACES = 6


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe."""
    names = TINY_RECIPES[:2] if setting.tiny else sorted(mf.recipes())
    return {name: partial(count, setting, name) for name in names}


def count(setting: Setting, recipe: str) -> Outcome:
    """The waits of the second step, which has made what is made once, with their places."""
    model, data = prepared(recipe)
    task = task_of(model)
    # a batch is made on the host and copied, as by training: what the host knows about it goes with it
    with torch.no_grad():
        on_host = task.batch(model, inputs_on(model, data), data["targets"])
    model.to(setting.device).train()

    def step() -> None:
        found = model.loss(to_device(on_host, setting.device))
        (found.total / found.targets + found.extra).backward()

    step()
    places: collections.Counter[str] = collections.Counter()

    def note(message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
        if "synchroniz" in str(message):
            ours = [frame for frame in traceback.extract_stack() if "/manyformer/" in frame.filename]
            path, number = (ours[-1].filename, ours[-1].lineno) if ours else (filename, line)
            places[f"{path.rpartition('/manyformer/')[2]}:{number}"] += 1

    if setting.on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            step()
    finally:
        if setting.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    listed = "; ".join(f"{place} x{number}" for place, number in places.most_common(MOST_PLACES))
    return judged(listed or "none", [], {"waits": float(sum(places.values()))})
