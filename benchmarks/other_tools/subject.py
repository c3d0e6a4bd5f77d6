"""A tiny model with its inputs, and comparisons with what it gives by itself."""

from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.analysis.own_models import build_tiny, tiny_keywords
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import task_of

ROWS = 2
LENGTH = 24
TOLERANCE = 1e-5
"""Of the largest number."""
HALF_TOLERANCE = 0.1
"""Of half precision, in the mean of squares: routes and clusters may be other ones."""


class WrongResult(Exception):
    """A tool gives something else than the model."""


class ToolMissing(Exception):
    """A tool is not installed."""


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

    def inputs(self, model: Any, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> tuple[Any, ...]:
        """The positional arguments of a call."""
        task = task_of(model)
        length = task.fixed_length(model) or min(length, model.max_length or length)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(task.token_ids(model), (rows, length), generator=generator)
        torch.manual_seed(seed)
        arguments = list(task.arguments(model, task.example(model, tokens)))
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


def compare(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise WrongResult if two tensors differ by more than `tolerance` of the largest number."""
    if found.shape != expected.shape:
        raise WrongResult(f"{what}: shape {tuple(found.shape)} in place of {tuple(expected.shape)}")
    found, expected = (x.detach().double() for x in (found, expected))
    # masked logits
    same = torch.isinf(expected) & (found == expected)
    difference = torch.where(same, 0.0, found - expected).abs().max()
    scale = torch.where(torch.isinf(expected), 0.0, expected).abs().max().clamp(min=1e-3)
    if not difference <= tolerance * scale:
        raise WrongResult(f"{what}: {difference:.1e} apart of {scale:.1e}")


def compare_all(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """`compare` for each of several tensors, by the scale of all together."""
    if set(found) != set(expected):
        raise WrongResult(f"other names: {sorted(set(found) ^ set(expected))[:3]}")
    vectors = [
        torch.cat([x.detach().double().flatten() for _, x in sorted(each.items())]) for each in (found, expected)
    ]
    compare(*vectors, "gradients", tolerance)


def compare_halves(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise WrongResult if a result of half precision is no approximation."""
    found, expected = (torch.where(torch.isinf(x), 0.0, x.detach().double()) for x in (found, expected))
    share = (found - expected).norm() / expected.norm().clamp(min=1e-3)
    if not share <= HALF_TOLERANCE:
        raise WrongResult(f"{what}: {share:.1e} of its norm apart")
