"""The relevance of each head for the predictions of a model, by layer-wise propagation (Voita et al. 2019, sec. 4).

A call of a kernel is one operation, whose rule takes the Jacobian of its outputs by queries, keys and values: position
terms, other weights than softmax and linear attention need no rule of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.analysis.heads.relevance_tape import EPSILON, MAX_IMPACTS, RelevanceTape, linear_relevance, rescaled
from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.model import eval_mode, model_name
from manyformer.models.tasks import Inputs
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.attention.head_gates import attention_heads
from manyformer.nn.core import LayerOutput, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.registry import task_of

TARGETS_PER_PASS = 16
"""Predictions that are explained at a time, which bounds the memory for long texts."""


def head_relevance(model: Model, inputs: Inputs) -> dict[str, Float[Tensor, "t h"]]:
    """The relevance of each head for the largest logit of each prediction of one sequence.

    The sum of the absolute relevance of the head's outputs before the output projection, where that of the logit is 1,
    by the names of `attention_heads`; Voita et al. (2019, section 4), whose head relevance is that divided by the
    largest one of the layer, averaged over the predictions: `layer_relevance`. Relevance stops at the embeddings.
    Raises UserError for a model with operations that have no rule, such as attention that chooses keys by hashing."""
    layers = attention_heads(model)
    if not layers:
        raise UserError(f"{model_name(model)} has no attention heads")
    with torch.no_grad(), eval_mode(model):
        tape = RelevanceTape()
        with ExitStack() as stack:
            merged = stack.enter_context(_recorded_heads(layers))
            for record in (_tracked_embeddings, recorded_kernels, recorded_rotations):
                stack.enter_context(record(model, tape))
            stack.enter_context(tape)
            logits = task_of(model).call(model, inputs).logits
        rows = logits.reshape(-1, logits.shape[-1])
        best = rows.argmax(-1)
        parts: dict[str, list[Tensor]] = {name: [] for name in merged}
        # all relevance on the tape has an axis of targets: a few at a time bound its memory
        for targets in torch.split(torch.arange(len(rows), device=logits.device), TARGETS_PER_PASS):
            relevance = logits.new_zeros(len(targets), *rows.shape)
            # all relevance of a prediction starts at its largest logit
            relevance[torch.arange(len(targets)), targets, best[targets]] = 1
            relevances = tape.propagate(logits, relevance.view(len(targets), *logits.shape))
            for name, tensors in merged.items():
                parts[name].append(_sum_by_head(relevances, tensors, layers[name].heads, len(targets)))
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def layer_relevance(relevance: Float[Tensor, "t h"]) -> Float[Tensor, " h"]:
    """The relevance of the heads of a layer, divided by the largest one, averaged over the predictions."""
    largest = relevance.amax(-1, keepdim=True)
    return (relevance / largest.clamp(min=torch.finfo(relevance.dtype).tiny)).mean(0)


def _sum_by_head(relevances: dict[int, Tensor], merged: list[Tensor], heads: int, targets: int) -> Tensor:
    """The absolute relevance of each head's slice of the merged outputs (b, l, h f), over all calls of the layer."""
    total = merged[0].new_zeros(targets, heads)
    for y in merged:
        if id(y) in relevances:
            total += torch.unflatten(relevances[id(y)], -1, (heads, -1)).abs().sum((1, 2, 4))
    return total


@contextmanager
def _recorded_heads(layers: dict[str, MultiHeadLayer]) -> Iterator[dict[str, list[Tensor]]]:
    """The inputs of the output projection of each layer, in all calls inside the block."""
    merged: dict[str, list[Tensor]] = {name: [] for name in layers}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            # its input is where the heads stand side by side, still apart from each other
            projection = getattr(layer, "out_proj", None)
            if not isinstance(projection, nn.Linear):
                raise UserError(f"relevance needs an output projection after the heads, which {name} does not have")

            def record(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                merged[name].append(args[0])

            hooks.enter_context(projection.register_forward_pre_hook(record))
        yield merged


@contextmanager
def _tracked_embeddings(model: nn.Module, tape: RelevanceTape) -> Iterator[None]:
    """Track the outputs of all embeddings inside the block. Raises UserError after it if there was none."""
    is_tracked = False

    def track(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal is_tracked
        is_tracked = True
        tape.track(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, SourceEmbedding):
                hooks.enter_context(module.register_forward_hook(track))
        yield
    if not is_tracked:
        raise UserError(
            f"relevance begins at embeddings of tokens, patches or frames, which {model_name(model)} does not have"
        )


@contextmanager
def recorded_kernels(model: nn.Module, tape: RelevanceTape) -> Iterator[None]:
    """Record each call of a kernel inside the block as one operation, where no cheaper rule serves it.

    That is every kernel but softmax without terms in its scores. Raises UserError for kernels that choose pairs by
    content, whose outputs jump where a choice changes."""
    kernels = _outer_kernels(model)
    for name, kernel in kernels.items():

        def record(call: KernelCall, name: str = name, kernel: Kernel = kernel) -> LayerOutput:
            # plain softmax is recorded by the tape itself, whose rule for it needs no Jacobian
            if isinstance(kernel, SoftmaxKernel) and not call.position.required_seams() & {"score", "value"}:
                return type(kernel).forward(kernel, call)
            if any(part.content_based for part in named_kernels(kernel).values()):
                raise UserError(
                    f"relevance has no rule for {type(kernel).__name__} ({name}), which chooses pairs by their content"
                )
            if len(call.q) != 1:
                raise UserError(f"relevance of {type(kernel).__name__} ({name}) is that of one row, not {len(call.q)}")
            with tape.paused():
                output = type(kernel).forward(kernel, call)
            inputs = tuple(x for x in (call.q, call.k, call.v) if tape.is_tracked(x))
            if inputs:
                tape.record(inputs, (output.y,), lambda parts: _relevance_of(inputs, kernel, call, parts[0]))
            return output

        # on the instance: hooks could not replace what the tape records inside of the kernel
        kernel.forward = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kernel in kernels.values():
            del kernel.forward


@contextmanager
def recorded_rotations(model: nn.Module, tape: RelevanceTape) -> Iterator[None]:
    """Record the rotation of queries and keys as one linear map, a sample being one head of one token."""
    rotations = [module for module in model.modules() if isinstance(module, RotaryPosition)]
    for position in rotations:
        for name in ("query", "key"):
            setattr(position, name, partial(_recorded_rotation, tape, getattr(position, name)))
    try:
        yield
    finally:
        for position in rotations:
            del position.query, position.key


def _recorded_rotation(
    tape: RelevanceTape, rotate: Callable[[Tensor, TokenPositions], Tensor], x: Tensor, positions: TokenPositions
) -> Tensor:
    with tape.paused():
        y = rotate(x, positions)
        # the rotation of each unit vector is a column of its matrix
        basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        columns = [rotate(row.expand(len(x), 1, *x.shape[2:]).clone(), positions) for row in basis]
        jacobian = torch.stack(columns, -1).expand(*x.shape, -1)
    if tape.is_tracked(x):
        tape.record((x,), (y,), lambda parts: [linear_relevance(parts[0], x, jacobian, None)])
    return y


def _relevance_of(inputs: tuple[Tensor, ...], kernel: Kernel, call: KernelCall, relevance: Tensor) -> list[Tensor]:
    """The relevance of those of queries, keys and values that are tracked."""
    parts = kernel_relevance(relevance, kernel, call)
    tensors = (call.q, call.k, call.v)
    # queries that are the keys get both parts
    return [sum(part for part, x in zip(parts, tensors) if x is tracked) for tracked in inputs]  # type: ignore[misc]


def _outer_kernels(model: nn.Module) -> dict[str, Kernel]:
    """The kernels that are no parts of other kernels, by their names."""
    kernels = named_kernels(model)
    inner = {part for kernel in kernels.values() for part in kernel.modules() if part is not kernel}
    return {name: kernel for name, kernel in kernels.items() if kernel not in inner}


def kernel_relevance(
    relevance: Float[Tensor, "t 1 h l f"], kernel: Kernel, call: KernelCall
) -> tuple[Float[Tensor, "t 1 h l e"], Float[Tensor, "t 1 g s e"], Float[Tensor, "t 1 g s f"]]:
    """The relevance of queries, keys and values of a kernel, by the Jacobian of each head's outputs.

    Heads do not depend on each other, so that one backward pass serves all of them, and copies of the row several
    outputs at a time. Keys that heads share get the sum of what they get from each."""
    groups = call.q.shape[1] // call.k.shape[1]
    # one copy of the keys for each query head, so that no head receives the relevance of another
    inputs = [call.q[0], *(x[0].repeat_interleave(groups, dim=0) for x in (call.k, call.v))]
    heads, length, width = relevance.shape[2:]
    run = partial(_run, kernel, call)
    count = sum(x[0].numel() for x in inputs)
    with torch.no_grad():
        # the outputs at zero are shared evenly by all inputs, as in the rule for linear maps
        offset = run([torch.zeros_like(x)[None] for x in inputs])[0].flatten(1) / count
    flat = relevance.flatten(3)[:, 0]
    totals = [relevance.new_zeros(len(relevance), *x.shape) for x in inputs]
    size = max(1, MAX_IMPACTS // (heads * max(count, length * call.k.shape[2])))
    for outputs in torch.split(torch.arange(length * width), size):
        impacts = torch.cat([part.flatten(2) for part in _impacts(run, inputs, outputs, width)], dim=2)
        impacts += offset[:, outputs].T[..., None]
        received = flat[:, :, outputs].permute(1, 0, 2)  # h t c
        above = impacts.clamp(min=0).transpose(0, 1)  # h c n
        below = impacts.clamp(max=0).transpose(0, 1)
        shares = (received / (above.sum(-1)[:, None] + EPSILON)) @ above
        shares += (received / (below.sum(-1)[:, None] - EPSILON)) @ below
        for total, part in zip(totals, torch.split(shares.transpose(0, 1), [x[0].numel() for x in inputs], dim=-1)):
            total += part.view_as(total) / 2
    q, *shared = rescaled(totals, relevance[:, 0], 2)
    k, v = (torch.unflatten(part, 1, (-1, groups)).sum(2)[:, None] for part in shared)
    return q[:, None], k, v


def _run(kernel: Kernel, call: KernelCall, inputs: list[Tensor]) -> Float[Tensor, "c h l f"]:
    """The outputs of the kernel for copies of the row with other queries, keys and values."""
    q, k, v = inputs
    output = type(kernel).forward(kernel, call._replace(q=q, k=k, v=v, state=None, watch=no_watch))
    return output.y


def _impacts(run: partial[Tensor], inputs: list[Tensor], outputs: Tensor, width: int) -> list[Tensor]:
    """The Jacobian rows (c, h, *input) of these outputs, by number in (l f), times the inputs."""
    with torch.enable_grad():
        copies = [x.expand(len(outputs), *x.shape).clone().requires_grad_() for x in inputs]
        # a copy of the row for each explained output: one backward pass serves all of them
        y = run(copies)
        selected = y[torch.arange(len(outputs)), :, outputs // width, outputs % width].sum()
        gradients = torch.autograd.grad(selected, copies, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g * x.detach() for g, x in zip(gradients, copies)]
