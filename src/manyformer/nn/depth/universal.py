"""The Universal Transformer: a block applied repeatedly with shared weights, here a fixed number of steps."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Context, Layer, LayerOutput, State
from manyformer.nn.positions.step_signal import PositionStepSignal
from manyformer.nn.residual import Residual


class UniversalState(NamedTuple):
    """The states of attention and transition for each step, and that of cross-attention, which all steps share."""

    attention_states: list[State]
    transition_states: list[State]
    cross_state: State


@final
class UniversalBlock(Layer):
    """The repeated block: self-attention, optional cross-attention, and a transition (Dehghani et al. 2019).

    Its state is a list of the states of the three.
    """

    def __init__(self, attention: Residual, transition: Residual, *, cross: Residual | None = None) -> None:
        super().__init__()
        if not isinstance(attention.inner, Attention):
            raise ValueError(f"UniversalBlock: attention must be an Attention, not a {type(attention.inner).__name__}")
        self.attention = attention
        self.cross = cross
        self.transition = transition

    @property
    def inner_attention(self) -> Attention:
        """The attention within the branch `attention`."""
        return self.attention.inner  # type: ignore[return-value] # checked when it was built

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        # in this order everywhere: the state is a list without names
        parts = (self.attention, self.cross, self.transition)
        return [
            None if part is None else part.init_state(batch, capacity=capacity, device=device, dtype=dtype)
            for part in parts
        ]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        attention_state, cross_state, transition_state = (None, None, None) if state is None else state
        x, (attention_state, cross_state), loss = self.attend(x, ctx, (attention_state, cross_state))
        y, transition_state, transition_loss = self.transition(x, ctx, transition_state)
        next_state = None
        if state is not None:
            next_state = [attention_state, cross_state, transition_state]
        return LayerOutput(y, next_state, loss + transition_loss)

    def attend(self, x: Float[Tensor, "b l d"], ctx: Context, state: tuple[State, State]) -> LayerOutput:
        """Self-attention followed by cross-attention; the state is a pair of their states."""
        y, attention_state, loss = self.attention(x, ctx, state[0])
        if self.cross is None:
            return LayerOutput(y, (attention_state, None), loss)
        y, cross_state, cross_loss = self.cross(y, ctx, state[1])
        return LayerOutput(y, (attention_state, cross_state), loss + cross_loss)

    def init_cross_state(self, x: Float[Tensor, "b l d"]) -> State:
        """The initial state of cross-attention; with it the source is projected once for all steps."""
        if self.cross is None:
            return None
        return self.cross.init_state(x.shape[0], device=x.device, dtype=x.dtype)


def init_step_states(
    block: UniversalBlock, steps: int, batch: int, *, capacity: int | None, device: torch.device, dtype: torch.dtype
) -> UniversalState:
    """The state before any token of a block that is applied `steps` times."""
    states = [block.init_state(batch, capacity=capacity, device=device, dtype=dtype) for _ in range(steps)]
    attention_states = [first for first, _, _ in states]
    transition_states = [last for _, _, last in states]
    # the source is the same at every step, so that one projection of it serves all
    return UniversalState(attention_states, transition_states, states[0][1])


@final
class FixedSteps(Layer):
    """Applies `block` a fixed number of `steps`, with position and step signals added before each (section 2.1).

    X = H + P_t, A = LN(X + attention(X)), H = LN(A + transition(A)): a stack of layers with shared weights, which
    receive the number of their step.
    """

    def __init__(self, block: UniversalBlock, timing: PositionStepSignal, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"FixedSteps: steps ({steps}) must be at least 1")
        # raises ValueError if the table of step vectors is too short
        timing.steps(steps - 1)
        self.block = block
        self.timing = timing
        self.steps = steps

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return init_step_states(self.block, self.steps, batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        attention_states, transition_states, cross_state = unpack_step_states(self.block, x, state, self.steps)
        position_vectors = self.timing.position_vectors(x, ctx.positions)
        loss: Tensor | float = 0.0
        for step in range(self.steps):
            x = self.timing.add_signals(x, position_vectors, step)
            block_state = [attention_states[step], cross_state, transition_states[step]]
            x, (attention_states[step], cross_state, transition_states[step]), extra = self.block(x, ctx, block_state)
            loss = loss + extra
        next_state = None
        if state is not None:
            next_state = UniversalState(attention_states, transition_states, cross_state)
        return LayerOutput(x, next_state, loss)

    def extra_repr(self) -> str:
        return f"{self.steps} steps"


def unpack_step_states(
    block: UniversalBlock, x: Float[Tensor, "b l d"], state: UniversalState | None, steps: int
) -> UniversalState:
    """A copy of `state` whose lists the steps overwrite; without a state only that of cross-attention is kept."""
    if state is None:
        return UniversalState([None] * steps, [None] * steps, block.init_cross_state(x))
    return UniversalState(list(state.attention_states), list(state.transition_states), state.cross_state)
