"""Operators on the meta device that are answered from shapes: as torch's own, and without its compiler."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.nn.runtime import shapes_alone
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.runtime.shapes_alone import ShapesAlone

COMPILER = ("torch._dynamo", "sympy", "torch._inductor")


def layout(result: Any) -> list[Any]:
    """Shape, dtype and strides of a result; dimensions of size 1 have any stride."""
    tensors = [part for part in (result if isinstance(result, tuple | list) else [result]) if isinstance(part, Tensor)]
    return [
        (tuple(x.shape), x.dtype, [stride for stride, size in zip(x.stride(), x.shape) if size != 1], x.device.type)
        for x in tensors
    ]


def inputs() -> dict[str, Tensor]:
    """Tensors with the layouts that models have: contiguous, transposed, broadcast, of integers and of truths."""
    with torch.device("meta"):
        x = torch.empty(2, 5, 3, 8)
        return {
            "x": x,
            "heads": x.transpose(1, 2),
            "row": torch.empty(8),
            "column": torch.empty(5, 1, 1),
            "half": torch.empty(2, 5, 3, 8, dtype=torch.bfloat16),
            "ids": torch.empty(2, 5, dtype=torch.int64),
            "mask": torch.empty(2, 5, 1, 1, dtype=torch.bool),
            "flat": torch.empty(10, 8),
            "weight": torch.empty(8, 6),
            "batch": torch.empty(2, 5, 8),
        }


OPERATORS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "sums with broadcasting": lambda t: (t["x"] + t["row"], t["heads"] * t["row"], t["x"] - t["column"], 1 - t["x"]),
    "transposed operands": lambda t: (t["heads"] + t["heads"], t["heads"].exp(), t["heads"] * t["x"].transpose(1, 2)),
    "other dtypes": lambda t: (t["half"] * 2.0, t["half"] + t["x"], t["ids"] + 1, t["ids"] / 2, t["ids"] // 2),
    "comparisons": lambda t: (t["x"] > 0, t["ids"] == 3, ~t["mask"], t["mask"] & t["mask"]),
    "choices": lambda t: (torch.where(t["mask"], t["x"], 0.0), t["x"].masked_fill(t["mask"], -1.0)),
    "activations": lambda t: (F.gelu(t["x"]), F.silu(t["heads"]), F.softplus(t["x"]), torch.sigmoid(t["x"])),
    "new tensors": lambda t: (
        torch.zeros(3, 2, device="meta"),
        torch.full((2,), 7, device="meta"),
        torch.arange(2, 9, 2, device="meta"),
        torch.arange(3.0, device="meta"),
        torch.eye(3, device="meta"),
        torch.linspace(0, 1, 5, device="meta"),
        t["x"].new_zeros(4),
        torch.zeros_like(t["heads"]),
        torch.full_like(t["ids"], 1),
    ),
    "copies": lambda t: (t["heads"].clone(), t["heads"].contiguous(), t["x"].half(), F.pad(t["x"], (1, 2))),
    "products": lambda t: (
        t["flat"] @ t["weight"],
        F.linear(t["batch"], t["weight"].T, torch.empty(6, device="meta")),
        torch.bmm(t["batch"], t["batch"].transpose(1, 2)),
        t["flat"] @ t["row"],
    ),
    "over dimensions": lambda t: (
        t["x"].sum(),
        t["mask"].sum(),
        t["heads"].amax(-1),
        t["heads"].mean((0, 2), keepdim=True),
        t["x"].logsumexp(1),
        t["mask"].any(1),
        t["x"].norm(dim=-1),
        t["heads"].softmax(-1),
        F.layer_norm(t["batch"], (8,)),
        t["x"].cumsum(1),
    ),
    "selections": lambda t: (
        torch.cat([t["x"], t["x"]], -1),
        torch.cat([t["heads"], t["heads"]], 2),
        torch.stack([t["row"], t["row"]]),
        t["flat"].index_select(0, t["ids"][0]),
        t["batch"].gather(1, t["ids"][..., None].expand(2, 5, 8)),
        F.embedding(t["ids"], t["flat"]),
        t["row"].repeat(3, 2),
        t["flat"][t["ids"]],
        t["flat"].tril(),
        t["flat"].flip(0),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_answer_from_shapes_is_that_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OPERATORS[name](inputs())
    answered = []
    find_rule = shapes_alone._find_rule

    def remember(func: Any) -> Any:
        answered.append(func)
        return find_rule(func)

    monkeypatch.setattr(shapes_alone, "_rules", {})
    monkeypatch.setattr(shapes_alone, "_find_rule", remember)
    with ShapesAlone():
        actual = OPERATORS[name](inputs())
    assert answered
    assert layout(actual) == layout(expected)


def test_the_backward_pass_has_gradients_of_the_same_layout() -> None:
    def gradients() -> list[Any]:
        t = inputs()
        x = t["batch"].requires_grad_()
        weight = t["weight"].requires_grad_()
        y = F.layer_norm(x, (8,)) @ weight
        F.cross_entropy(F.gelu(y).flatten(0, 1), t["ids"].flatten()).backward()
        return layout([x.grad, weight.grad])

    expected = gradients()
    with ShapesAlone():
        assert gradients() == expected


def test_what_does_not_fit_is_still_refused() -> None:
    t = inputs()
    with ShapesAlone():
        for job in (lambda: t["flat"] @ t["flat"], lambda: t["x"] + torch.empty(7, device="meta")):
            with pytest.raises(RuntimeError):
                job()


def test_tensors_with_numbers_are_computed() -> None:
    with ShapesAlone():
        assert torch.arange(4).sum().item() == 6
        assert torch.zeros(2).uniform_(3, 4).min() >= 3


def test_operations_are_counted_around_the_answers() -> None:
    t = inputs()
    expected = count_flops(lambda: t["flat"] @ t["weight"])
    with ShapesAlone():
        assert count_flops(lambda: t["flat"] @ t["weight"]) == expected == 2 * 10 * 8 * 6


@pytest.mark.parametrize(
    ("words", "unloaded"),
    [
        (["show", "gpt2"], (*COMPILER, "manyformer.training", "manyformer.data", "manyformer.analysis.figures")),
        (["plan", "transformer-lm", "depth=1", "dim=64"], (*COMPILER, "manyformer.data", "manyformer.conversion")),
        (["train", "lm/stdlib", "--dry-run"], (*COMPILER, "manyformer.inference.generate")),
        (["advise", "--length", "2000"], ("torch",)),
        (["list"], ("torch",)),
        (["runs"], ("torch",)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_only_what_it_needs(words: list[str], unloaded: tuple[str, ...]) -> None:
    never = (*unloaded, "transformers", "matplotlib", "scipy", "pandas", "datasets")
    code = f"import sys; from manyformer.cli import run; code = run({words!r}); "
    code += f"print(code, [name for name in {never!r} if name in sys.modules], file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "0 []"
