"""Greedy tokens of every generative recipe on the device against those that the CPU writes with the same weights."""

import copy
from functools import partial
from typing import Any

import torch

import manyformer as mf
from gpu_parts.correctness import without_tf32
from gpu_parts.decoding_speed import equal_share
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged
from manyformer.analysis.own_models import build_tiny
from manyformer.inference.decoding_options import StepPath
from manyformer.inference.generate import SourceBatch, answer_sources, decoding_from_options
from manyformer.inference.generate.protocol import ContinuesText, TranslatesText
from manyformer.inference.generate.result import GenerationResult
from manyformer.models import Model
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import task_of

NEW_TOKENS = 12
LENGTHS = (9, 5, 12)
"""Prompts of several lengths, so that rows are padded at the left."""
SAME_TOKENS = 0.95
"""Two logits of random weights may tie within rounding, and all that follows differs."""


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe that writes texts."""
    names = TINY_RECIPES[:2] if setting.tiny else sorted(mf.recipes())
    return {name: partial(compare, setting, name) for name in names}


def compare(setting: Setting, recipe: str) -> Outcome:
    """Eager steps, and captured ones where the model has them."""
    # heads of 16 channels, the least that FlexAttention computes on a GPU
    has_heads = {"dim", "heads"} <= get_recipe(recipe).signature.parameters.keys()
    model = build_tiny(recipe, {"dim": 32} if has_heads else {}, 0).eval()
    if not isinstance(model, ContinuesText | TranslatesText):
        return Outcome("not run", "it writes no text")
    expected = written(model, "eager").tokens
    copied = copy.deepcopy(model).to(setting.device)
    numbers, misses, paths = {}, [], []
    with without_tf32():
        for path in ("eager", "auto"):
            result = written(copied, path)
            share = equal_share(expected, result.tokens)
            numbers[f"{path}, share unlike the CPU's"] = 1 - share
            paths.append(f"{path}: {result.stats.cache}")
            if share < SAME_TOKENS:
                misses.append(f"{share:.0%} of the tokens of {path} steps are those of the CPU")
    return judged(f"{NEW_TOKENS} tokens after 5 to 12", misses, numbers, paths)


def written(model: Model, path: StepPath) -> GenerationResult:
    """What a model writes after the same prompts, or for the same sources."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"max_new": NEW_TOKENS, "stop_ids": (), "step_path": path}
    if not isinstance(model, TranslatesText):
        prompts = [torch.randint(4, model.vocab, (length,), generator=generator).tolist() for length in LENGTHS]
        return mf.generate(model, prompts, batch=len(prompts), **options)
    task = task_of(model)
    tokens = torch.randint(task.token_ids(model), (2, task.fixed_length(model) or 12), generator=generator)
    source, _, segments, _ = task.arguments(model, task.example(model, tokens.to(model.device)))
    return answer_sources(model, SourceBatch(source, segments), decoding=decoding_from_options(**options))
