"""Columns of one's own training loop."""

import copy
import io
from typing import Any

import torch

from other_tools.comparisons import WrongResult, compare, compare_all, compare_halves
from other_tools.subject import Subject, gradients_of, output_of, scalar_of


def own_loop(subject: Subject) -> None:
    """Ten steps of AdamW: the loss falls, and a second model gives the same numbers."""
    curves = []
    for _ in range(2):
        torch.manual_seed(0)
        model = subject.model().train()
        batch = subject.batch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(10):
            result = model(batch)
            loss = result.total / max(1, batch.target_count()) + result.extra
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves.append(losses)
    compare(torch.tensor(curves[0]), torch.tensor(curves[1]), "losses of two loops")
    if not curves[0][-1] < curves[0][0]:
        raise WrongResult(f"the loss went from {curves[0][0]:.4g} to {curves[0][-1]:.4g}")


def accumulation(subject: Subject) -> None:
    """Two passes add up to twice the gradient of one."""
    model = subject.model()
    inputs = subject.inputs(model)
    once = gradients_of(model, inputs)
    for _ in range(2):
        scalar_of(output_of(model, inputs)).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad / 2 for n, p in model.named_parameters()}
    compare_all(found, once)


def autocast(subject: Subject) -> None:
    """bfloat16 by autocast, forward and backward."""
    model = subject.model()
    inputs = subject.inputs(model)
    expected = output_of(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = output_of(model, inputs)
    compare_halves(logits, expected, "logits")
    scalar_of(logits.float()).backward()
    _check_finite(model)


def bfloat16(subject: Subject) -> None:
    """A model of bfloat16, with the inputs that a model of float32 takes."""
    model = subject.model()
    inputs = subject.inputs(model)
    expected = output_of(model, inputs)
    model.to(torch.bfloat16)
    logits = output_of(model, inputs)
    compare_halves(logits, expected, "logits")
    scalar_of(logits.float()).backward()
    _check_finite(model)


def _check_finite(model: torch.nn.Module) -> None:
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if bad:
        raise WrongResult(f"gradients of {bad[0]} are not finite")


def deepcopy(subject: Subject) -> None:
    """A copy gives the same and is another model."""
    model = subject.model()
    inputs = subject.inputs(model)
    expected = output_of(model, inputs).detach()
    other = copy.deepcopy(model)
    compare(output_of(other, inputs), expected, "the copy", 0.0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    compare(output_of(model, inputs), expected, "the original, once the copy is changed", 0.0)


def state_dict(subject: Subject) -> None:
    """Saved by torch.save and loaded into a model with other weights."""
    model = subject.model()
    inputs = subject.inputs(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = subject.fresh()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    compare(output_of(other, inputs), output_of(model, inputs), "the loaded model", 0.0)


def hooks(subject: Subject) -> None:
    """Hooks on all modules are called and change nothing."""
    model = subject.model()
    inputs = subject.inputs(model)
    expected = output_of(model, inputs)
    called = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, o, name=name: called.add(name))
    compare(output_of(model, inputs), expected, "with hooks")
    if not called - {""}:
        raise WrongResult("no hook of a part was called")


def watch(subject: Subject) -> str | None:
    """Watched weights are those of rows that sum to 1, and watching changes no logits."""
    model = subject.model()
    inputs = subject.inputs(model)
    expected = output_of(model, inputs)
    seen: list[Any] = []
    logits = model(*inputs, watch=lambda *watched: seen.append(watched)).logits
    compare(logits, expected, "watched")
    return None if seen else "nothing to watch"


COLUMNS = {
    "own loop": own_loop,
    "accumulation": accumulation,
    "autocast": autocast,
    "bf16": bfloat16,
    "deepcopy": deepcopy,
    "state_dict": state_dict,
    "hooks": hooks,
    "watch": watch,
}
