"""The same layer again and again: what the Universal Transformer repeats, and so many times for every token."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.attention import Attention
from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, Residual, State
from manyformer.position import PositionStepSignal


class UniversalState(NamedTuple):
    """For each step what attention and transition remember; keys of a source are the same at all of them."""

    own: list[State]
    work: list[State]
    cross: State


@final
class UniversalBlock(Layer):
    """What is repeated: attention to the own stream, perhaps to a source, and a transition (Dehghani et al. 2019).

    Its state is that of the three.
    """

    def __init__(self, attention: Residual, transition: Residual, *, cross: Residual | None = None) -> None:
        super().__init__()
        if not isinstance(attention.inner, Attention):
            raise ValueError(f"Block: attention must be an Attention, not a {type(attention.inner).__name__}")
        self.attention, self.cross, self.transition = attention, cross, transition

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        parts = (self.attention, self.cross, self.transition)
        return [
            None if part is None else part.init_state(batch, capacity=capacity, device=device, dtype=dtype)
            for part in parts
        ]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        own, cross, work = (None, None, None) if state is None else state
        x, (own, cross), loss = self.attend(x, ctx, (own, cross))
        y, work, extra = self.transition(x, ctx, work)
        return LayerOutput(y, None if state is None else [own, cross, work], loss + extra)

    def attend(self, x: Float[Tensor, "b l d"], ctx: Context, state: tuple[State, State]) -> LayerOutput:
        """Both kinds of attention; the state is that of each."""
        y, own, loss = self.attention(x, ctx, state[0])
        if self.cross is None:
            return LayerOutput(y, (own, None), loss)
        y, cross, extra = self.cross(y, ctx, state[1])
        return LayerOutput(y, (own, cross), loss + extra)

    def uses_memory(self, x: Float[Tensor, "b l d"]) -> State:
        """What attention to a source remembers at first: with it, the source is projected once for all steps."""
        return None if self.cross is None else self.cross.init_state(len(x), device=x.device, dtype=x.dtype)


def start_steps(
    block: UniversalBlock, steps: int, batch: int, *, capacity: int | None, device: torch.device, dtype: torch.dtype
) -> UniversalState:
    """The state before any token of a block that runs so many times."""
    each = [block.init_state(batch, capacity=capacity, device=device, dtype=dtype) for _ in range(steps)]
    return UniversalState([own for own, _, _ in each], [work for _, _, work in each], each[0][1])


@final
class FixedSteps(Layer):
    """`block` for a fixed number of steps, with the signals of position and step before each (section 2.1).

    X = H + P_t, A = LN(X + attention(X)), H = LN(A + transition(A)): a stack of layers that share their weights, and
    are told where they stand.
    """

    def __init__(self, block: UniversalBlock, timing: PositionStepSignal, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"FixedSteps: steps ({steps}) must be at least 1")
        # a table of too few steps says so
        timing.steps(steps - 1)
        self.block, self.timing, self.steps = block, timing, steps

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return start_steps(self.block, self.steps, batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        own, work, cross = unpack_state(self.block, x, state, self.steps)
        where = self.timing.positions(x, ctx.positions)
        loss: Tensor | float = 0.0
        for step in range(self.steps):
            x = self.timing.at_step(x, where, step)
            x, (own[step], cross, work[step]), extra = self.block(x, ctx, [own[step], cross, work[step]])
            loss = loss + extra
        return LayerOutput(x, None if state is None else UniversalState(own, work, cross), loss)

    def extra_repr(self) -> str:
        return f"{self.steps} steps"


def unpack_state(
    block: UniversalBlock, x: Float[Tensor, "b l d"], state: UniversalState | None, steps: int
) -> UniversalState:
    """Lists to be filled in; without a state nothing but the source is remembered, from step to step."""
    if state is None:
        return UniversalState([None] * steps, [None] * steps, block.uses_memory(x))
    return UniversalState(list(state.own), list(state.work), state.cross)


def real_tokens(ctx: Context, like: Float[Tensor, "b l d"]) -> Tensor:
    """Which tokens are no padding, (b, l)."""
    return (ctx.positions.segment_ids != PADDING_SEGMENT).expand(like.shape[:2])
