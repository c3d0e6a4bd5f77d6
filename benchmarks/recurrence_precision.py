"""The precision of chunks of recurrences in float32 under weak and strong decays, against a loop in float64.

    python benchmarks/recurrence_precision.py
    python benchmarks/recurrence_precision.py --mixture all --nats 10 1000

256 tokens of 2 heads, 16 channels of keys and values, documents of about 30 tokens, a memory before the first one. Of
the tokens (decays of heads) or of their channels a quarter forget by so many nats and the others by 0.01, or all forget
by half to one and a half times as many. Errors are the largest ones divided by the largest entry: of the outputs and
the last memory, and of the gradients of all inputs, among which the worst counts. The loop in float32 is what decoding
computes.
"""

from collections.abc import Callable
from typing import Any

import frame
import torch
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.linear import linear_attention, matrix_recurrence
from manyformer.nn.linear.matrix_recurrence import RecurrenceResult, Removal

HEADS, LENGTH, WIDTH = 2, 256, 16
NATS = (0.01, 0.3, 1.0, 3.5, 10.0, 50.0, 1e3, 1e4)
FORMS = ("linear, heads", "delta, heads", "decay, channels", "delta, channels", "general, channels")
Recurrence = Callable[..., RecurrenceResult]


def linear(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, run: Tensor, memory: Tensor) -> RecurrenceResult:
    """The chunks of linear attention, whose gradient is handwritten."""
    return linear_attention.chunked(q, k, v, decay, run, memory)


def drawn_inputs(form: str, nats: float, *, is_mixed: bool) -> dict[str, Tensor]:
    """Inputs of `matrix_recurrence.chunked`; those of a removal by the names of its vectors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH) for _ in range(3))
    share = torch.rand(1, HEADS, LENGTH, WIDTH if form.endswith("channels") else 1)
    decay = -torch.where(share < 0.25, nats, 0.01) if is_mixed else -nats * (0.5 + share)
    memory = torch.randn(1, HEADS, WIDTH, WIDTH)
    inputs = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "decay": decay, "memory": memory}
    if form.startswith("delta"):
        inputs["strength"] = 2 * torch.rand(1, HEADS, LENGTH)
    if form.startswith("general"):
        inputs["w"] = F.normalize(torch.randn_like(k), dim=-1)
        inputs["u"] = inputs["w"] * torch.rand_like(k)
    return inputs


def results(function: Recurrence, inputs: dict[str, Tensor], run: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, the last memory, and the gradients of all inputs, computed in this type."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    arguments: dict[str, Any] = dict(leaves)
    if "w" in leaves:
        arguments["removal"] = Removal(arguments.pop("w"), arguments.pop("u"))
    y, last = function(**arguments, run=run)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [y, last, *torch.autograd.grad((y * up).sum() + last.square().sum(), list(leaves.values()))]


def errors(form: str, nats: float, *, is_mixed: bool) -> list[float]:
    """Of outputs and of gradients in chunks, and of all results in a loop in float32."""
    inputs = drawn_inputs(form, nats, is_mixed=is_mixed)
    run = (torch.rand(1, LENGTH) < 1 / 30).long().cumsum(1)
    chunks = linear if form.startswith("linear") else matrix_recurrence.chunked
    exact = results(matrix_recurrence.recurrent, inputs, run, torch.float64)
    in_chunks, in_loop = (
        [relative_error(x, y) for x, y in zip(results(function, inputs, run, torch.float32), exact, strict=True)]
        for function in (chunks, matrix_recurrence.recurrent)
    )
    return [max(in_chunks[:2]), max(in_chunks[2:]), max(in_loop)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the largest entry, unless that is below the numbers of float32."""
    largest = expected.detach().abs().amax().clamp(min=1e-37)
    return float((actual.detach().double() - expected.detach()).abs().amax() / largest)


def main() -> None:
    """Print a table for each kind of mixture."""
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--nats", type=float, nargs="+", default=NATS, help="how much strong decays forget")
    parser.add_argument("--mixture", choices=("quarter", "all"), help="who forgets so much [both]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for mixture in ("quarter", "all"):
        if arguments.mixture not in (None, mixture):
            continue
        print(f"\n{mixture} forget; outputs / gradients / the loop in float32")
        print(f"{'nats':>10}", *(f"{form:>28}" for form in FORMS))
        for nats in arguments.nats:
            cells = [errors(form, nats, is_mixed=mixture == "quarter") for form in FORMS]
            texts = [" / ".join(f"{error:.0e}" for error in cell) for cell in cells]
            print(f"{nats:>10g}", *(f"{text:>28}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
