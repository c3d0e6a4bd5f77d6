"""A tiny model with its inputs, and what it gives by itself."""

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.analysis.own_models import build_tiny, tiny_keywords
from manyformer.nn.core import tree_map
from manyformer.nn.model_inputs import Inputs
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import task_of

ROWS = 2
LENGTH = 24
WHOLE_TEXTS = {"compressive-transformer", "reformer", "routing-transformer"}
"""Recipes whose state does not give what one pass gives."""


class ToolMissing(Exception):
    """A tool is not installed."""


class ToolLimit(Exception):
    """A sentence on what a tool cannot do, whatever the model."""


@final
class Subject:
    """A recipe with tiny sizes; every model and every input is the same at each call."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def model(self, **keywords: Any) -> nn.Module:
        """The model in evaluation mode."""
        return build_tiny(self.recipe, keywords, 0).eval()

    def fresh(self) -> nn.Module:
        """A model with other weights, of the current device and dtype."""
        torch.manual_seed(7)
        return build(self.recipe, **tiny_keywords(self.recipe)).eval()

    def has_keyword(self, name: str) -> bool:
        """Whether the recipe takes a keyword."""
        return name in get_recipe(self.recipe).signature.parameters

    def fixed_length(self, model: Any) -> bool:
        """Whether all inputs have one length."""
        return task_of(model).fixed_length(model) is not None

    def example(self, model: Any, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Inputs:
        """What a model reads."""
        task = task_of(model)
        length = task.fixed_length(model) or min(length, model.max_length or length)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(task.token_ids(model), (rows, length), generator=generator)
        torch.manual_seed(seed)
        return task.example(model, tokens)

    def inputs(self, model: Any, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> tuple[Any, ...]:
        """The positional arguments of a call."""
        arguments = list(task_of(model).arguments(model, self.example(model, rows, length, seed)))
        while arguments[-1] is None:
            arguments.pop()
        return tuple(arguments)

    def batch(self, model: Any) -> Any:
        """A batch of the training loop."""
        task = task_of(model)
        tokens = torch.randint(
            task.token_ids(model), (ROWS, task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH))
        )
        inputs = task.example(model, tokens)
        generator = torch.Generator().manual_seed(1)
        return task.batch(model, inputs, task.random_targets(model, inputs, generator))


def output_of(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The logits."""
    logits: Tensor = model(*inputs).logits
    return logits


def one_pass(model: Any, example: Inputs) -> Tensor:
    """The logits of a call that may have a state."""
    with torch.no_grad():
        return task_of(model).call(model, example).logits


def decodes(model: Any) -> bool:
    """Whether single tokens, each with the state of those before, give what one pass gives."""
    return task_of(model).one_token_step(model) is not None and model.spec.recipe not in WHOLE_TEXTS


def decoded_of(model: Any, inputs: Inputs, rows: Sequence[int] | None = None, *, by_forward: bool = False) -> Tensor:
    """The logits of a prompt, half of the inputs, and then of single tokens; `rows` are chosen after the first."""
    task = task_of(model)
    half = inputs.tokens.shape[1] // 2
    with torch.inference_mode():
        prompt = inputs.columns(0, half)
        output = task.call(model, prompt, task.init_state(model, prompt))
        state = output.state
        outputs = [output.logits]
        bind = task.one_token_step(model)
        assert bind is not None
        step = bind()
        for column in range(half, inputs.tokens.shape[1]):
            token = inputs.columns(column, column + 1)
            if by_forward:
                output = task.call(model, token, state)
                logits = output.logits
                state = output.state
            elif task.takes_source:
                memory, own = state
                logits, own = step(token.tokens, own, memory)
                state = (memory, own)
            else:
                logits, state = step(token.tokens, state, None)
            outputs.append(logits)
            if rows is not None and column == half:
                state = tree_map(partial(torch.index_select, dim=0, index=torch.tensor(rows)), state)
                inputs = inputs.rows(rows)
    return torch.cat(outputs, 1)


def scalar_of(logits: Tensor) -> Tensor:
    """A number with a gradient for every logit, which all differ."""
    weights = torch.linspace(-1.0, 1.0, logits.numel(), dtype=torch.float64).view(logits.shape)
    finite = torch.where(torch.isinf(logits), 0.0, logits)
    return (finite * weights.to(logits.dtype).cos()).sum()


def gradients_of(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """The gradients of all weights; zero for those without one."""
    weights = dict(model.named_parameters())
    scalar = scalar_of(output_of(model, inputs))
    found = torch.autograd.grad(scalar, list(weights.values()), allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for (name, weight), gradient in zip(weights.items(), found)
    }
