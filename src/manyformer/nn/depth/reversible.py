"""Reversible layers, whose inputs are reconstructed from their outputs instead of being stored for the gradient."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import Chain, Context, Layer, LayerOutput, MemorySequence, State, no_watch
from manyformer.nn.residual import Residual
from manyformer.nn.runtime.devices import (
    device_generator_state,
    drawing_devices,
    forked_generators,
    set_device_generator,
    wide_dtype,
)
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, needs_plain_operations
from manyformer.nn.runtime.recompute import ChoiceTape, recording_choices, replaying_choices
from manyformer.nn.runtime.torch_internals import compiler_disabled, has_autocast

StreamMerge = Literal["mean", "concat"]


@final
class ReversibleStack(Layer):
    """Residual branches that add alternately to two streams (Gomez et al. 2017; Kitaev et al. 2020, section 3).

    With attention F and feed-forward G a layer is y1 = x1 + F(x2), y2 = x2 + G(y1), from which x2 = y2 - G(y1) and
    x1 = y1 - F(x2) follow: only the last outputs are stored, and every branch is recomputed for its gradient, with the
    same random numbers and the same choices (see `manyformer.nn.runtime.recompute`). A layer may have any number of
    branches. Both streams start as the input; their mean is the output, or both side by side for `merge` "concat", as
    in the released models. Streams are summed
    in a wider dtype than branches are computed, so that the subtraction recovers the inputs of branches bit for bit.

    The layers are chains of residual branches, as in a `Chain`. Raises ValueError for a branch that is not only added,
    such as one with a norm after the sum.
    """

    recomputes = True

    def __init__(self, merge: StreamMerge = "mean", /, **layers: Layer) -> None:
        super().__init__()
        self.merge: StreamMerge = merge
        for name, layer in layers.items():
            if not isinstance(layer, Chain):
                raise ValueError(f"layer {name} ({type(layer).__name__}) must be a Chain of residual branches")
            self.add_module(name, layer)
            for part in layer.children():
                if not isinstance(part, Residual) or not part.only_adds:
                    raise ValueError(
                        f"layer {name}: a branch must only be added, so that it can be subtracted again: its norms "
                        "must be inside (norm_order='pre' or 'sandwich')"
                    )

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [part.init_state(batch, capacity=capacity, device=device, dtype=dtype) for part in self._branches()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        branches = list(self._branches())
        # watchers would see every branch twice, and states are no inputs that gradients flow to
        is_reversed = state is None and torch.is_grad_enabled() and ctx.watch is no_watch
        if is_reversed and not needs_plain_operations():
            attended, transformed, losses = _run_reversible(branches, x, ctx)
            return LayerOutput(self._merged(attended, transformed, x), None, losses)
        x1 = x2 = _to_wide(x)
        loss: Tensor | float = 0.0
        next_states: list[State] = []
        for index, residual in enumerate(branches):
            branch_state = None if state is None else state[index]
            update, next_state, branch_loss = residual.summand(x2.to(x.dtype), ctx, branch_state)
            x1, x2 = x2, x1 + update
            next_states.append(next_state)
            loss = loss + branch_loss
        return LayerOutput(self._merged(x1, x2, x), None if state is None else next_states, loss)

    def _merged(self, x1: Tensor, x2: Tensor, x: Tensor) -> Tensor:
        """The output of both streams, in the dtype of `x`."""
        return ((x1 + x2) / 2 if self.merge == "mean" else torch.cat([x1, x2], -1)).to(x.dtype)

    def _branches(self) -> Iterator[Residual]:
        for layer in self.children():
            yield from layer.children()  # type: ignore[misc]


def _to_wide(x: Tensor) -> Tensor:
    """`x` in the wider dtype of the streams: float32 for half precision, else the widest of the device."""
    if x.dtype.itemsize < 4:
        return x.float()
    return x.to(wide_dtype(x.device))


class ReversibleCall(NamedTuple):
    """The inputs of one pass over the branches that are not passed as tensors with gradients."""

    branches: Sequence[Residual]
    ctx: Context
    weights: Sequence[nn.Parameter]


@compiler_disabled
def _run_reversible(branches: Sequence[Residual], x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Both streams after all branches, and the losses of these."""
    # each parameter once, also where branches share it: it is an argument of the function, and has one gradient
    weights = {id(w): w for part in branches for w in part.parameters() if w.requires_grad}
    call = ReversibleCall(branches, ctx, list(weights.values()))
    memory = None if ctx.memory is None else ctx.memory.y
    streams: tuple[Tensor, Tensor, Tensor] = _ReversibleFunction.call(call, x, memory, *call.weights)
    return streams


class _ReversibleFunction(HandwrittenGradient):
    @staticmethod
    def forward(
        ctx: Any, call: ReversibleCall, x: Tensor, memory: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.passes = []
        wide = _to_wide(x)
        x1 = wide.clone()
        x2 = wide.clone()
        loss = x.new_zeros(())
        for residual in call.branches:
            ctx.passes.append(RecordedPass(x))
            with ctx.passes[-1].record():
                update, _, branch_loss = residual.summand(x2.to(x.dtype), call.ctx)
            # in place, which is why both streams were copied: no activation but the last two survives
            x1, x2, loss = x2, x1.add_(update), loss + branch_loss
        ctx.dtype = x.dtype
        ctx.save_for_backward(x1, x2, memory)
        return x1, x2, loss

    @staticmethod
    def backward(ctx: Any, grad1: Tensor, grad2: Tensor, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        x1, x2, memory = ctx.saved_tensors
        # Long-lived tensors are allocated before the loop and written in place: between the short-lived tensors of the
        # branches they would fragment the allocator's memory, which would then grow with depth after all.
        x1 = x1.clone()
        x2 = x2.clone()
        grad1 = grad1.clone()
        grad2 = grad2.clone()
        shared = ctx.call.ctx
        if memory is not None:
            memory = memory.detach().requires_grad_()
            shared = replace(shared, memory=MemorySequence(memory, shared.memory.positions))
        gradients = _GradientSums([*ctx.call.weights, *([] if memory is None else [memory])])
        for residual, recorded_pass in zip(reversed(ctx.call.branches), reversed(ctx.passes)):
            inputs = [x1.detach().to(ctx.dtype).requires_grad_(), *([] if memory is None else [memory])]
            inputs += [weight for weight in residual.parameters() if weight.requires_grad]
            with torch.enable_grad(), recorded_pass.replay():
                update, _, branch_loss = residual.summand(inputs[0], shared)
            # in the forward pass the branch of the present x1 was added to what is now x2
            x1, x2 = x2.sub_(update.detach()), x1
            grads = _compute_gradients([(update, grad2.to(update.dtype)), (branch_loss, grad_loss)], inputs)
            grad1, grad2 = grad2, grad1 if grads[0] is None else grad1.add_(grads[0])
            gradients.add(inputs[1:], grads[1:])
        return None, (grad1 + grad2).to(ctx.dtype), gradients.get(memory), *map(gradients.get, ctx.call.weights)


class _GradientSums:
    """Sums of the gradients of given tensors, in memory allocated in advance."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sums = {id(tensor): torch.zeros_like(tensor) for tensor in tensors}
        self._received: set[int] = set()

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of `tensors`; None counts as zero."""
        for tensor, grad in zip(tensors, grads):
            if grad is not None:
                self._sums[id(tensor)] += grad
                self._received.add(id(tensor))

    def get(self, tensor: Tensor | None) -> Tensor | None:
        """The sum of the gradients of `tensor`; None if it never received one."""
        if id(tensor) in self._received:
            return self._sums[id(tensor)]
        return None


def _compute_gradients(outputs: list[tuple[Tensor | float, Tensor]], inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of `inputs`, given pairs of an output and its gradient; outputs without gradients are skipped."""
    differentiable = [(output, grad) for output, grad in outputs if isinstance(output, Tensor) and output.requires_grad]
    if not differentiable:
        return [None] * len(inputs)
    results, output_gradients = zip(*differentiable)
    return torch.autograd.grad(results, inputs, output_gradients, allow_unused=True)


@final
class RecordedPass:
    """The random states, discrete choices and autocast settings of the first computation of a branch."""

    def __init__(self, x: Tensor) -> None:
        self.choices: ChoiceTape = []
        self.device_type = x.device.type
        self.rng_states = [torch.get_rng_state()]
        self.devices = drawing_devices([x.device])
        self.rng_states += [device_generator_state(device) for device in self.devices]
        available = has_autocast(self.device_type)
        self.autocast_enabled = torch.is_autocast_enabled(self.device_type) if available else None
        self.autocast_dtype = torch.get_autocast_dtype(self.device_type) if available else None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the choices of the first computation, made inside the block."""
        with self._recorded_autocast(), recording_choices(self.choices):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Replay random numbers and choices inside the block; the random states are restored afterwards."""
        with forked_generators(self.devices), self._recorded_autocast(), replaying_choices(self.choices):
            torch.set_rng_state(self.rng_states[0])
            for device, state in zip(self.devices, self.rng_states[1:]):
                set_device_generator(device, state)
            yield

    def _recorded_autocast(self) -> AbstractContextManager[object]:
        """The recorded autocast settings, without the weight cache, which may hold weights cast without gradients."""
        if self.autocast_enabled is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.autocast_dtype, self.autocast_enabled, cache_enabled=False)
