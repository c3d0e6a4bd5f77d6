"""The recurrences of fla-core against our definition, token by token, and against our chunks in speed."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_parts.outcome import Item, Outcome, Setting, judged, relative_error
from manyformer.analysis.benchmarks import paired_ratio, take_turns
from manyformer.nn.linear import fla_recurrence, matrix_recurrence

ROUNDS = 3
TOLERANCE = 2e-2
"""Of outputs, memories and gradients of bfloat16 products, as shares of the largest."""
SPEED_GOAL = 1.0
"""The time of fla-core as a share of that of our chunks."""

Recurrence = Callable[..., tuple[Tensor, Tensor]]


class RecurrenceKind(NamedTuple):
    """Decays of a head, of its channels or none, and whether tokens correct the memory."""

    decays: str
    corrects: bool


KINDS = {
    "sum": RecurrenceKind("none", corrects=False),
    "decay of heads": RecurrenceKind("head", corrects=False),
    "decay of channels": RecurrenceKind("channel", corrects=False),
    "delta": RecurrenceKind("none", corrects=True),
    "gated delta": RecurrenceKind("head", corrects=True),
    "channel-gated delta": RecurrenceKind("channel", corrects=True),
}


def items(setting: Setting) -> dict[str, Item]:
    """Each kind for one document from a state and for packed rows."""
    return {
        f"{name}, {rows}": partial(compare, setting, kind, documents)
        for name, kind in KINDS.items()
        for rows, documents in (("one document", 1), ("packed", 3))
    }


def speed_items(setting: Setting) -> dict[str, Item]:
    """The speed of each kind."""
    return {name: partial(contest, setting, kind) for name, kind in KINDS.items()}


def operator_of(setting: Setting, kind: RecurrenceKind) -> Recurrence | str:
    """The recurrence by fla-core, or why it is not run; in a rehearsal our chunks stand for it."""
    if not setting.on_gpu:
        return lambda *args, dtype, **options: matrix_recurrence.chunked(*args, **options)
    per_head = kind.decays == "head"
    refusal = fla_recurrence.fla_refusal(setting.device, torch.bfloat16, 64, has_decay_per_head=per_head)
    return fla_recurrence.chunked if refusal is None else refusal


def inputs_of(setting: Setting, kind: RecurrenceKind, length: int, rows: int) -> dict[str, Tensor]:
    """Random queries, keys of length 1, values, a memory, decays and strengths."""
    heads, width, values = (2, 8, 12) if setting.tiny else (4, 64, 96)

    def draw(*shape: int) -> Tensor:
        return torch.randn(rows, heads, *shape, device=setting.device)

    tensors = {"q": draw(length, width), "k": torch.nn.functional.normalize(draw(length, width), dim=-1)}
    tensors |= {"v": draw(length, values), "memory": draw(width, values)}
    if kind.decays != "none":
        tensors["decay"] = -0.1 * draw(length, 1 if kind.decays == "head" else width).abs()
    if kind.corrects:
        tensors["strength"] = draw(length).sigmoid()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def results_of(recurrence: Recurrence, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs, the last memory, and the gradients by input."""
    y, memory = recurrence(**tensors, **options)
    weights = [torch.arange(x.numel(), device=x.device).view(x.shape).cos() for x in (y, memory)]
    total = (y.float() * weights[0]).sum() + (memory * weights[1]).sum()
    gradients = torch.autograd.grad(total, list(tensors.values()))
    return {"outputs": y, "memory": memory} | {f"gradient of {name}": x for name, x in zip(tensors, gradients)}


def compare(setting: Setting, kind: RecurrenceKind, documents: int) -> Outcome:
    """Outputs, memory and gradients against the loop over tokens in float32."""
    recurrence = operator_of(setting, kind)
    if isinstance(recurrence, str):
        return Outcome("not run", recurrence)
    length = 37 if setting.tiny else 1025
    tensors = inputs_of(setting, kind, length, 2)
    column = torch.arange(length, device=setting.device)
    run = (column * documents // length).expand(2, -1) if documents > 1 else None
    actual = results_of(recurrence, tensors, run=run, dtype=torch.bfloat16)
    expected = results_of(matrix_recurrence.recurrent, tensors, run=run)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    misses = [f"{name} differ by more than {TOLERANCE:.0e}" for name, error in errors.items() if not error <= TOLERANCE]
    return judged(f"{max(errors.values()):.1e} apart at most, {length} tokens", misses, errors)


def contest(setting: Setting, kind: RecurrenceKind) -> Outcome:
    """Forward and backward, theirs and ours."""
    recurrence = operator_of(setting, kind)
    if isinstance(recurrence, str):
        return Outcome("not run", recurrence)
    length, rows = (64, 1) if setting.tiny else (4096, 4)
    tensors = inputs_of(setting, kind, length, rows)
    jobs = {
        "fla": partial(results_of, recurrence, tensors, dtype=torch.bfloat16),
        "ours": partial(results_of, matrix_recurrence.chunked, tensors),
    }
    for job in jobs.values():
        job()
    times = take_turns(jobs, ROUNDS, setting.device)
    numbers = {f"{name}, ms": 1e3 * statistics.median(each) for name, each in times.items()}
    ratio = numbers["fla over ours"] = paired_ratio(times["fla"], times["ours"]).median
    misses = [f"{ratio:.2f} of our chunks' time, goal {SPEED_GOAL}"] if setting.has_goals and ratio > SPEED_GOAL else []
    return judged(f"{length} tokens, forward and backward", misses, numbers)
