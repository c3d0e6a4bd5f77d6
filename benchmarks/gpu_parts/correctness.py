"""Every recipe on the device against the same weights and inputs on the CPU: outputs, loss and gradients."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import manyformer as mf
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged, relative_error
from manyformer.analysis.own_models import build_tiny
from manyformer.models import Model
from manyformer.nn.core import tree_map
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import task_of

LENGTH, ROWS = 48, 2
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-3, 0.1
"""Of float32 outputs and gradients as shares of the largest; of bfloat16 outputs as a share of their spread."""


class ModelResult(NamedTuple):
    """Logits, loss and the gradients by parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def single_items(setting: Setting) -> dict[str, Item]:
    """Each recipe in float32."""
    return {name: partial(compare_single, setting, name) for name in names(setting)}


def half_items(setting: Setting) -> dict[str, Item]:
    """Each recipe in bfloat16."""
    return {name: partial(compare_half, setting, name) for name in names(setting)}


def names(setting: Setting) -> Sequence[str]:
    """All recipes, or a few for a rehearsal."""
    return TINY_RECIPES if setting.tiny else sorted(mf.recipes())


def compare_single(setting: Setting, recipe: str) -> Outcome:
    """Outputs, loss and gradients in float32, without TF32."""
    model, data = prepared(recipe)
    expected, again = result_of(model, data), result_of(model, data, seed=1)
    if draws_numbers(expected, again):
        return Outcome("not run", "the model draws random numbers, which differ between devices")
    copied = copy.deepcopy(model).to(setting.device)
    with without_tf32():
        actual = result_of(copied, data)
    paths = mf.explain(copied, *task_of(copied).arguments(copied, inputs_on(copied, data))).values()
    return judge(actual, expected, list(paths))


def judge(actual: ModelResult, expected: ModelResult, paths: list[str]) -> Outcome:
    """The outcome of a comparison in float32."""
    numbers = {
        "logits": relative_error(actual.logits, expected.logits),
        "loss": relative_error(actual.loss, expected.loss),
    }
    # a gradient that is zero but for rounding has no relative error of its own
    largest = max((float(grad.abs().max()) for grad in expected.gradients.values() if grad.numel()), default=0.0)
    gradients = {
        name: relative_error(actual.gradients[name], grad) * float(grad.abs().max()) / max(largest, 1e-12)
        for name, grad in expected.gradients.items()
        if grad.numel()
    }
    worst = max(gradients, key=lambda name: (gradients[name] != gradients[name], gradients[name]), default="")
    numbers["gradient"] = gradients.get(worst, 0.0)
    limits = {"logits": OUTPUT_TOLERANCE, "loss": OUTPUT_TOLERANCE, "gradient": GRADIENT_TOLERANCE}
    misses = [f"{name} differ by more than {limit:.0e}" for name, limit in limits.items() if not numbers[name] <= limit]
    if worst and "gradient differ" in "".join(misses):
        misses.append(f"worst is {worst}")
    sentence = f"logits {numbers['logits']:.1e}, loss {numbers['loss']:.1e}, gradients {numbers['gradient']:.1e} apart"
    return judged(sentence, misses, numbers, paths)


def compare_half(setting: Setting, recipe: str) -> Outcome:
    """Outputs of bfloat16 autocast against float32 on the CPU."""
    card = get_recipe(recipe).card
    if reason := card.reasons.get("bfloat16"):
        return Outcome("not run", f"not promised: {reason}")
    model, data = prepared(recipe)
    expected, again = result_of(model, data), result_of(model, data, seed=1)
    if draws_numbers(expected, again):
        return Outcome("not run", "the model draws random numbers, which differ between devices")
    copied = copy.deepcopy(model).to(setting.device)
    autocast = torch.autocast(setting.device.type, torch.bfloat16) if model.allows_autocast else nullcontext()
    actual = result_of(copied, data, autocast=autocast)
    spread = (expected.logits - expected.logits.mean()).square().mean().sqrt().clamp(min=1e-12)
    error = float((actual.logits.float().cpu() - expected.logits).square().mean().sqrt() / spread)
    finite = all(bool(torch.isfinite(grad).all()) for grad in actual.gradients.values())
    misses = [] if error <= HALF_TOLERANCE else [f"more than {HALF_TOLERANCE}"]
    misses += [] if finite else ["a gradient is not finite"]
    return judged(f"logits {error:.1e} of their spread apart", misses, {"logits": error})


def draws_numbers(result: ModelResult, of_another_seed: ModelResult) -> bool:
    """Whether outputs or the loss, which may choose what it scores, depend on the seed."""
    pairs = (result.logits, of_another_seed.logits), (result.loss, of_another_seed.loss)
    return not all(torch.equal(*pair) for pair in pairs)


def prepared(recipe: str) -> tuple[Model, dict[str, Any]]:
    """A tiny model in evaluation mode, and tokens and targets for it."""
    # heads of 16 channels, the least that FlexAttention computes on a GPU
    has_heads = {"dim", "heads"} <= get_recipe(recipe).signature.parameters.keys()
    model = build_tiny(recipe, {"dim": 32} if has_heads else {}, 0).eval()
    task, generator = task_of(model), torch.Generator().manual_seed(0)
    length = task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH)
    tokens = torch.randint(task.token_ids(model), (ROWS, length), generator=generator)
    targets = task.random_targets(model, task.example(model, tokens), generator)
    return model, {"tokens": tokens, "targets": targets}


def inputs_on(model: Model, data: dict[str, Any]) -> Any:
    """The example inputs on the device of the model."""
    return task_of(model).example(model, data["tokens"].to(model.device))


def result_of(
    model: Model, data: dict[str, Any], *, seed: int = 0, autocast: AbstractContextManager[Any] | None = None
) -> ModelResult:
    """One forward and backward pass, the forward one under `autocast`."""
    torch.manual_seed(seed)
    task, inputs = task_of(model), inputs_on(model, data)
    targets = tree_map(lambda tensor: tensor.to(model.device), data["targets"])
    with autocast or nullcontext():
        with torch.no_grad():
            logits = task.call(model, inputs).logits
        torch.manual_seed(seed)
        loss = model.loss(task.batch(model, inputs, targets))
        total = loss.total / loss.targets + loss.extra
    model.zero_grad(set_to_none=True)
    total.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return ModelResult(logits, total.detach()[None], gradients)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products and convolutions without TF32, which torch allows in convolutions by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
