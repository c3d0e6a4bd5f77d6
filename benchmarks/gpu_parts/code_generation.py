"""The default of training on a GPU, compiled with code generation under bfloat16 autocast, against eager steps."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import manyformer as mf
from gpu_parts.correctness import inputs_on, prepared
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged
from manyformer.models import Model
from manyformer.nn.core import tree_map
from manyformer.nn.runtime.torch_internals import compile_backward_as_eager
from manyformer.recipes.parts.registry import task_of

RECIPES = (
    *("transformer-lm", "llama", "gated-deltanet", "mamba-2", "longformer-lm", "qwen3-next", "retnet", "gla", "kda"),
    *("deepseek", "mixtral", "bert", "vit", "alibi", "t5", "reformer", "linear-transformer", "rwkv-7"),
)
"""One of each kind of attention, recurrence, position and task; code generation for all would take an hour."""

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-2, 0.1
"""Of bfloat16 losses and of the norm of all gradients, as shares of those of eager steps."""


def items(setting: Setting) -> dict[str, Item]:
    """Each of them that there is."""
    names = TINY_RECIPES[:1] if setting.tiny else [name for name in RECIPES if name in mf.recipes()]
    return {name: partial(compare, setting, name) for name in names}


def compare(setting: Setting, recipe: str) -> Outcome:
    """Loss and gradients of one step."""
    model, data = prepared(recipe)
    eager_model = model.to(setting.device).train()
    model = copy.deepcopy(eager_model)
    expected = step_of(setting, eager_model, data, compiled=False)
    torch.compiler.reset()
    try:
        actual = step_of(setting, model, data, compiled=True)
    finally:
        torch.compiler.reset()
    names = ("loss", "gradient norm")
    differences = {
        name: float((found - wanted).abs() / wanted.abs().clamp(min=1e-9))
        for name, found, wanted in zip(names, actual, expected, strict=True)
    }
    limits = dict(zip(names, (LOSS_TOLERANCE, GRADIENT_TOLERANCE), strict=True))
    misses = [f"{name} differs by {share:.1e}" for name, share in differences.items() if not share <= limits[name]]
    return judged(f"loss {float(actual[0]):.4f}, eager {float(expected[0]):.4f}", misses, differences)


def step_of(setting: Setting, model: Model, data: Any, *, compiled: bool) -> tuple[Tensor, Tensor]:
    """The loss of a step, and the norm of its gradients."""
    task = task_of(model)
    targets = tree_map(lambda tensor: tensor.to(setting.device), data["targets"])
    batch = task.batch(model, inputs_on(model, data), targets)

    def loss(batch: Any) -> Tensor:
        with setting.autocast():
            found = model.loss(batch)
        return found.total / found.targets + found.extra

    torch.manual_seed(0)
    if compiled:
        # as training does
        compile_backward_as_eager()
        total = torch.compile(loss, backend="inductor" if setting.on_gpu else "aot_eager")(batch)
    else:
        total = loss(batch)
    total.backward()
    gradients = [weight.grad.float() for weight in model.parameters() if weight.grad is not None]
    return total.detach().float(), torch.stack([gradient.norm() for gradient in gradients]).norm()
