"""Runs an operator of fla-core on a CPU, in Triton's interpreter, against our definition in float64.

`TRITON_INTERPRET=1 python interpreted_fla.py CASE...` prints a JSON object: for each case, such as
channel/corrects/float32 (decays, whether tokens correct the memory, type of the products), the largest error of each
output and gradient as a share of the largest value, or the words of the exception.

Triton expects a driver of a GPU, times the configurations of a kernel before it takes one, and compiles loops whose
counters are tensors. Here a driver says that the device is a CPU, the first configuration is taken, and counters of
loops are integers with the one method of a tensor that these kernels call."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from manyformer.nn.linear import fla_recurrence, matrix_recurrence

LENGTH, WIDTH, VALUES = 70, 16, 24
"""Two chunks of 64, of which the second is not whole."""

DECAYS = {"none": None, "head": 1, "channel": WIDTH}


class HostDriver:
    """What is asked of the active driver when a kernel is interpreted."""

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch=0, warp_size=32)

    def get_current_device(self) -> int:
        return 0


class Counter(int):
    """A number of a loop, which a kernel may convert as if it were a tensor."""

    def to(self, dtype: object) -> "Counter":
        return self


def counted(*bounds: int) -> Iterator[Counter]:
    return map(Counter, range(*bounds))


def run_first_configuration(tuner: Autotuner, *args: Any, **options: Any) -> Any:
    return tuner.fn.run(*args, **options, **tuner.configs[0].all_kwargs())


def prepare(name: str) -> None:
    """Make the kernels of an operator ones that the interpreter can run."""
    driver.set_active(HostDriver())
    Autotuner.run = run_first_configuration
    importlib.import_module(fla_recurrence.OPERATORS[name])
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith("fla."):
            vars(module)["range"] = counted


def draw_inputs(decays: int | None, *, corrects: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, 1, *shape, generator=generator)

    tensors = {"q": draw(LENGTH, WIDTH), "k": torch.nn.functional.normalize(draw(LENGTH, WIDTH), dim=-1)}
    tensors |= {"v": draw(LENGTH, VALUES), "memory": draw(WIDTH, VALUES)}
    if decays is not None:
        tensors["decay"] = -0.1 * draw(LENGTH, decays).abs()
    if corrects:
        tensors["strength"] = draw(LENGTH).sigmoid()
    return tensors


def results_of(function: Callable[..., Any], tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs, the last memory, and the gradients of a weighted sum of both by every input."""
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    result = function(**inputs, **options)
    weights = [torch.arange(x.numel(), dtype=torch.float64).view(x.shape).cos() for x in result]
    total = sum((x.double() * weight).sum() for x, weight in zip(result, weights))
    gradients = torch.autograd.grad(total, list(inputs.values()))
    named = {f"gradient of {name}": gradient for name, gradient in zip(inputs, gradients)}
    return {"outputs": result[0].detach(), "memory": result[1].detach(), **named}


def errors(decays: int | None, *, corrects: bool, dtype: torch.dtype) -> dict[str, float]:
    prepare(fla_recurrence.operator_name(decays, corrects=corrects))
    tensors = draw_inputs(decays, corrects=corrects)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    outcome = {}
    for rows, documents in (("one document", 1), ("packed", 3)):
        run = (torch.arange(LENGTH) * documents // LENGTH).expand(2, -1) if documents > 1 else None
        actual = results_of(fla_recurrence.chunked, tensors, run=run, dtype=dtype)
        expected = results_of(matrix_recurrence.recurrent, exact, run=run)
        for name, value in expected.items():
            outcome[f"{name}, {rows}"] = float((actual[name].double() - value).abs().max() / value.abs().max())
    return outcome


def outcome_of(case: str) -> dict[str, float] | str:
    decays, corrects, dtype = case.split("/")
    try:
        return errors(DECAYS[decays], corrects=corrects == "corrects", dtype=getattr(torch, dtype))
    except Exception as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps({case: outcome_of(case) for case in sys.argv[1:]}))
