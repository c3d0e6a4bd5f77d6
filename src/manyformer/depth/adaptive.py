"""The Universal Transformer with adaptive computation time: the number of steps depends on the token."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State, no_watch
from manyformer.depth.halted_kv import HaltedKVStore
from manyformer.depth.halting import HaltingState, HaltingUnit
from manyformer.depth.token_subset import AllTokens, TokenGroup, TokenSubset
from manyformer.depth.universal import (
    UniversalBlock,
    UniversalState,
    init_step_states,
    unpack_step_states,
)
from manyformer.feedforward import ChunkedLayer, FeedForward, GatedFeedForward
from manyformer.position import PositionStepSignal
from manyformer.sources import HaltedTokenSource
from manyformer.torch_internals import compiler_disabled


class StepInput(NamedTuple):
    """The inputs of a step: the states of all tokens, their position vectors, and the layer states of the step."""

    states: Float[Tensor, "b l d"]
    position_vectors: Float[Tensor, "b l d"]
    attention_state: State
    cross_state: State
    transition_state: State


class StepOutput(NamedTuple):
    """The outputs of a step for the tokens of a group: new states, halting probabilities, next layer states, loss."""

    states: Float[Tensor, "r n d"]
    halt_probability: Float[Tensor, "r n"]
    attention_state: State
    cross_state: State
    transition_state: State
    loss: Tensor | float


@final
class AdaptiveComputation(Layer):
    """Applies `block` to each token until it halts, at most `halting.max_steps` times.

    Dehghani et al. 2019, section 2.2; Graves 2016. Position and step signals are added before each step, and the
    halting probability is computed from the stream after them. A halted token is removed from its row and no longer
    computed. Its state stays fixed, and all tokens, also later ones, attend to it at every further step with the
    signals of that step, as in the equations. If the block's branches have no norm before them (post-norm), the keys of
    such a state are projected once and shifted from step to step, otherwise they are projected at every step.
    Transitions that mix tokens, such as convolutions, are computed for complete rows, with halted tokens in their fixed
    state.

    A watcher receives as "steps" the number of steps of each token, (b, l), and as "halting" the probabilities,
    (b, l, steps), zero after the last step; then everything is computed for all tokens. Raises ValueError for attention
    whose keys do not follow from the stream alone.
    """

    content_based = True

    def __init__(self, block: UniversalBlock, timing: PositionStepSignal, halting: HaltingUnit) -> None:
        super().__init__()
        attention = block.inner_attention
        kernel = attention.kernel
        if not isinstance(attention.source, HaltedTokenSource) or kernel.recurrent or kernel.tied_qk:
            raise ValueError(
                "AdaptiveComputation: the keys of halted tokens must be cached: "
                "Attention(..., SoftmaxKernel(), source=HaltedTokenSource())"
            )
        # raises ValueError if the table of step vectors is too short
        timing.steps(halting.max_steps - 1)
        self.block = block
        self.timing = timing
        self.halting = halting
        self.largest_count = halting.max_steps
        self._tokenwise_transition = isinstance(block.transition.inner, FeedForward | GatedFeedForward | ChunkedLayer)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        steps = self.halting.max_steps
        return init_step_states(self.block, steps, batch, capacity=capacity, device=device, dtype=dtype)

    # the number of steps depends on the data
    @compiler_disabled
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        states_by_step = unpack_step_states(self.block, x, state, self.halting.max_steps)
        attention_states, transition_states, cross_state = states_by_step
        valid = (ctx.positions.segment_ids != PADDING_SEGMENT).expand(x.shape[:2])
        halting_state = self.halting.init_state(valid, x)
        position_vectors = self.timing.position_vectors(x, ctx.positions)
        halted_store = HaltedKVStore(self.block, self.timing, ctx.positions, valid)
        states = x
        output = torch.zeros_like(x)
        loss = torch.zeros((), device=x.device)
        probabilities: list[Tensor] = []
        for step in range(self.halting.max_steps):
            if not (any_running := bool(halting_state.running.any())) and state is None:
                break
            inputs = StepInput(states, position_vectors, attention_states[step], cross_state, transition_states[step])
            if not any_running and self.halting.rule.freezes_state:
                attention_states[step], transition_states[step] = self._update_halted(inputs, ctx, halted_store, step)
                continue
            group = self._select_tokens(ctx, halting_state, valid)
            outputs = self._run_step(inputs, ctx, group, halted_store, step)
            states = group.scatter(states, outputs.states)
            halt_probability = group.scatter(torch.zeros_like(halting_state.probability_sum), outputs.halt_probability)
            weights, halting_state = self.halting.weigh(halting_state, halt_probability, step)
            output = self.halting.rule.mix(output, states, weights)
            attention_states[step] = outputs.attention_state
            transition_states[step] = outputs.transition_state
            cross_state = outputs.cross_state
            probabilities.append(halt_probability)
            loss = loss + outputs.loss
        self._report(ctx, halting_state, probabilities)
        loss = loss + self.halting.loss(halting_state, valid)
        next_state = None
        if state is not None:
            next_state = UniversalState(attention_states, transition_states, cross_state)
        return LayerOutput(output.to(x.dtype), next_state, loss)

    def _select_tokens(self, ctx: Context, halting_state: HaltingState, valid: Bool[Tensor, "b l"]) -> TokenGroup:
        """The tokens that the next step computes."""
        if not self.halting.rule.freezes_state or bool((halting_state.running == valid).all()):
            return AllTokens(ctx.positions)
        if ctx.watch is not no_watch:
            return AllTokens(ctx.positions, halting_state.running)
        return TokenSubset(ctx.positions, halting_state.running)

    def _run_step(
        self, inputs: StepInput, ctx: Context, group: TokenGroup, halted_store: HaltedKVStore, step: int
    ) -> StepOutput:
        x = self.timing.add_signals(group.gather(inputs.states), group.gather(inputs.position_vectors), step)
        halt_probability = self.halting(x)
        group_ctx = group.context(ctx)
        is_subset = isinstance(group, TokenSubset)
        attention_state = inputs.attention_state
        cross_state = group.select_rows(inputs.cross_state)
        if isinstance(group, TokenSubset):
            attention_state = halted_store.state_for_group(attention_state, inputs.states, group, step)
        x, (attention_state, cross_state), loss = self.block.attend(x, group_ctx, (attention_state, cross_state))
        if self._tokenwise_transition:
            y, transition_state, extra = self.block.transition(x, group_ctx, inputs.transition_state)
        else:
            full = group.scatter(inputs.states, x)
            y, transition_state, extra = self.block.transition(full, ctx, inputs.transition_state)
            y = group.gather(y)
        cross_state = inputs.cross_state if is_subset else cross_state
        return StepOutput(y, halt_probability, attention_state, cross_state, transition_state, loss + extra)

    def _update_halted(
        self, inputs: StepInput, ctx: Context, halted_store: HaltedKVStore, step: int
    ) -> tuple[State, State]:
        """The states of attention and transition after a step in which no token runs, for later tokens."""
        attention_state = halted_store.update_state(inputs.attention_state, inputs.states, ctx, step)
        if self._tokenwise_transition:
            return attention_state, inputs.transition_state
        return attention_state, self.block.transition(inputs.states, ctx, inputs.transition_state).state

    def _report(self, ctx: Context, halting_state: HaltingState, probabilities: list[Tensor]) -> None:
        if ctx.watch is not no_watch:
            ctx.watch(self, "steps", halting_state.steps)
            ctx.watch(self, "halting", torch.stack(probabilities, -1))
