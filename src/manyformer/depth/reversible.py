"""Layers whose inputs follow from their outputs, so that no activations need be kept for the gradient."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import AddJoin, Chain, Context, Layer, LayerOutput, MemorySequence, Residual, State, no_watch
from manyformer.recompute import ChoiceTape, recording_choices, replaying_choices


@final
class ReversibleStack(Layer):
    """Branches that add in turn to two streams (Gomez et al. 2017; Kitaev et al. 2020, section 3).

    With attention F and feed-forward G a layer is y1 = x1 + F(x2), y2 = x2 + G(y1), from which x2 = y2 - G(y1) and
    x1 = y1 - F(x2) follow: only the last outputs are kept, and every branch is computed again for its gradient, with
    the same random numbers and the same choices (see `manyformer.recompute`). Any number of branches a layer will do.
    Both streams begin as the input; their mean is the output, where the released models lay them side by side. They are
    summed more precisely than branches are computed, so that what is subtracted is what was added, to the last bit.

    Its layers are chains of residual branches, as for a `Chain`. Raises ValueError for a branch that does more than
    add, such as one with a norm after the sum.
    """

    def __init__(self, **layers: Chain) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
            for part in layer.children():
                if (
                    not isinstance(part, Residual)
                    or part.post_norm is not None
                    or not isinstance(part.join, AddJoin | None)
                ):
                    raise ValueError(
                        f"layer {name}: only a branch that is added can be taken back, so norms must stand before it "
                        "(norm='pre') or around it (norm='sandwich')"
                    )

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [part.init_state(batch, capacity=capacity, device=device, dtype=dtype) for part in self._branches()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        branches = list(self._branches())
        if state is None and torch.is_grad_enabled() and ctx.watch is no_watch:
            found: LayerOutput = _backwards(branches, x, ctx)
            return found
        one = other = _wide(x)
        loss: Tensor | float = 0.0
        after: list[State] = []
        for number, part in enumerate(branches):
            branch, new, extra = _branch(part, other.to(x.dtype), ctx, None if state is None else state[number])
            one, other = other, one + branch
            after.append(new)
            loss = loss + extra
        return LayerOutput(_mean(one, other, x), None if state is None else after, loss)

    def _branches(self) -> Iterator[Residual]:
        for layer in self.children():
            yield from layer.children()  # type: ignore[misc]


def _branch(part: Residual, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
    """What the branch adds to the stream."""
    y, state, loss = part.inner(x if part.pre_norm is None else part.pre_norm(x), ctx, state)
    y = y if part.inner_norm is None else part.inner_norm(y)
    return LayerOutput(part.join.dropout(y) if isinstance(part.join, AddJoin) else y, state, loss)


def _wide(x: Tensor) -> Tensor:
    """A stream that begins as `x`, with as many more digits as its sums need; Apple's devices have no more."""
    if x.dtype.itemsize < 4:
        return x.float()
    return x if x.device.type == "mps" else x.double()


def _mean(one: Tensor, other: Tensor, x: Tensor) -> Tensor:
    """What both streams give, as precise as what they began with."""
    return ((one + other) / 2).to(x.dtype)


class ReversibleCall(NamedTuple):
    """What one pass over the branches needs beside tensors that take gradients."""

    branches: Sequence[Residual]
    ctx: Context
    weights: Sequence[nn.Parameter]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _backwards(branches: Sequence[Residual], x: Tensor, ctx: Context) -> LayerOutput:
    weights = {id(w): w for part in branches for w in part.parameters() if w.requires_grad}
    call = ReversibleCall(branches, ctx, list(weights.values()))
    memory = None if ctx.memory is None else ctx.memory.y
    one, other, loss = _Backwards.apply(call, x, memory, *call.weights)  # type: ignore[no-untyped-call]
    return LayerOutput(_mean(one, other, x), None, loss)


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ReversibleCall, x: Tensor, memory: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.first = call, []
        wide = _wide(x)
        one, other = wide.clone(), wide.clone()
        loss = x.new_zeros(())
        for part in call.branches:
            ctx.first.append(RecordedPass(x))
            with ctx.first[-1].recorded():
                branch, _, extra = _branch(part, other.to(x.dtype), call.ctx)
            one, other, loss = other, one.add_(branch), loss + extra
        ctx.dtype = x.dtype
        ctx.save_for_backward(one, other, memory)
        return one, other, loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_one: Tensor, to_other: Tensor, to_loss: Tensor) -> tuple[Tensor | None, ...]:
        one, other, memory = ctx.saved_tensors
        # What lasts is made before the loop and written in place: pieces of it among what the branches need for a
        # moment would keep an allocator from using that memory again, and so memory would grow with depth after all.
        one, other, to_one, to_other = one.clone(), other.clone(), to_one.clone(), to_other.clone()
        shared = ctx.call.ctx
        if memory is not None:
            memory = memory.detach().requires_grad_()
            shared = replace(shared, memory=MemorySequence(memory, shared.memory.positions))
        found = _Found([*ctx.call.weights, *([] if memory is None else [memory])])
        for part, first in zip(reversed(ctx.call.branches), reversed(ctx.first)):
            inputs = [one.detach().to(ctx.dtype).requires_grad_(), *([] if memory is None else [memory])]
            inputs += [weight for weight in part.parameters() if weight.requires_grad]
            with torch.enable_grad(), first.replayed():
                branch, _, extra = _branch(part, inputs[0], shared)
            # before: `other` was `one`, and the branch of it was added to what is now `other`
            one, other = other.sub_(branch.detach()), one
            grads = _gradients([(branch, to_other.to(branch.dtype)), (extra, to_loss)], inputs)
            to_one, to_other = to_other, to_one if grads[0] is None else to_one.add_(grads[0])
            found.add(inputs[1:], grads[1:])
        return None, (to_one + to_other).to(ctx.dtype), found.of(memory), *map(found.of, ctx.call.weights)


class _Found:
    """Gradients of some tensors, summed up in memory that is there from the beginning."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sums = {id(tensor): torch.zeros_like(tensor) for tensor in tensors}
        self._met: set[int] = set()

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add what was found this time."""
        for tensor, grad in zip(tensors, grads):
            if grad is not None:
                self._sums[id(tensor)] += grad
                self._met.add(id(tensor))

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """The sum; None where nothing depends on it."""
        return self._sums[id(tensor)] if id(tensor) in self._met else None


def _gradients(ends: list[tuple[Tensor | float, Tensor]], inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the inputs from those of the results that depend on them."""
    known = [(end, up) for end, up in ends if isinstance(end, Tensor) and end.requires_grad]
    if not known:
        return [None] * len(inputs)
    results, ups = zip(*known)
    return torch.autograd.grad(results, inputs, ups, allow_unused=True)


@final
class RecordedPass:
    """What a branch's first computation drew, chose, and how precisely it computed."""

    def __init__(self, x: Tensor) -> None:
        self.choices: ChoiceTape = []
        self.kind, self.numbers = x.device.type, [torch.get_rng_state()]
        self.devices = [x.device] if self.kind == "cuda" else []
        self.numbers += [torch.cuda.get_rng_state(device) for device in self.devices]
        there = torch.amp.is_autocast_available(self.kind)
        self.reduced = torch.is_autocast_enabled(self.kind) if there else None
        self.dtype = torch.get_autocast_dtype(self.kind) if there else None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, the branch is computed for the first time."""
        with self._precision(), recording_choices(self.choices):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, it is computed again; afterwards random numbers go on as if it had not been."""
        with torch.random.fork_rng(self.devices), self._precision(), replaying_choices(self.choices):
            torch.set_rng_state(self.numbers[0])
            for device, state in zip(self.devices, self.numbers[1:]):
                torch.cuda.set_rng_state(state, device)
            yield

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast as it was; a weight cast without gradients must not be kept for a use with them."""
        if self.reduced is None:
            return nullcontext()
        return torch.autocast(self.kind, self.dtype, self.reduced, cache_enabled=False)
