"""The Universal Transformer with adaptive computation time: each token decides after how many steps it halts."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.attention.kv_cache.kv_source import HaltedTokenSource
from manyformer.nn.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State, no_watch
from manyformer.nn.depth.token_subset import AllTokens, HaltedKVStore, TokenGroup, TokenSubset
from manyformer.nn.depth.universal import UniversalBlock, UniversalState, init_step_states, unpack_step_states
from manyformer.nn.feed_forward.feedforward import ChunkedLayer, FeedForward, GatedFeedForward
from manyformer.nn.positions.step_signal import PositionStepSignal
from manyformer.nn.runtime.handwritten_gradient import hides_values
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled


class HaltingState(NamedTuple):
    """For each token: whether it still runs, its sum of halting probabilities, its steps, its remainder on halting."""

    running: Bool[Tensor, "b l"]
    probability_sum: Float[Tensor, "b l"]
    steps: Float[Tensor, "b l"]
    remainder: Float[Tensor, "b l"]


class HaltingRule(ABC):
    """Turns halting probabilities into weights.

    `freezes_state` states whether a halted token keeps its state; every token then halts at the last step.
    """

    freezes_state: bool

    def weigh(
        self, state: HaltingState, probability: Float[Tensor, "b l"], *, slack: float, last: bool
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of this step's states, 0 for tokens that do not run, and the halting state after the step.

        A token halts when the sum of its probabilities exceeds 1 - `slack`.
        """
        # the remainder goes to the last step, or the weights of a token would not sum to 1
        halts_now = last and self.freezes_state
        if halts_now:
            reached = torch.ones_like(state.running)
        else:
            reached = state.probability_sum + probability > 1 - slack
        running = state.running & ~reached
        # the last weight of a token is what is left of 1, not its last probability
        remainder = torch.where(state.running & reached, 1 - state.probability_sum, 0.0)
        weights = torch.where(running, probability, remainder)
        probability_sum = state.probability_sum + weights
        steps = state.steps + state.running
        return weights, HaltingState(running, probability_sum, steps, state.remainder + remainder)

    @abstractmethod
    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        """The output so far, updated with this step's states."""


@final
class GravesHalting(HaltingRule):
    """The output is the sum of all states weighted by their probabilities; the last one has the remaining probability.

    Graves 2016 (arXiv:1603.08983), section 2; Dehghani et al. 2019, section 2.2: a token that has halted is copied. So
    weights always sum to 1: at the maximum number of steps a token halts whatever its probability.
    """

    freezes_state = True

    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return output + weights[..., None] * states


@final
class ReleasedHalting(HaltingRule):
    """The default of Tensor2Tensor's Universal Transformer (`act_type="basic"`), which differs from the papers.

    Each state is mixed into the output by its weight, as a moving average: with probabilities 0.3, 0.4 and a remainder
    of 0.3 the share of the first state ends as 0.3 x 0.6 x 0.7, and shares sum to less than 1. A halted token continues
    to change, and other tokens attend to its changed states. At the last step halting is not forced: a token that has
    not halted by then has no remainder.
    """

    freezes_state = False

    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return weights[..., None] * states + (1 - weights[..., None]) * output


@final
class HaltingUnit(nn.Module):
    """A probability of halting for each token and step, a sigmoid of the stream (Graves 2016, section 2).

    There are `max_steps` steps at most; the loss is `ponder_cost` times the mean over tokens of steps plus remainder,
    whose gradient is that of the remainder alone. `bias` is the initial bias of the sigmoid: with 1 an untrained token
    takes two steps.
    """

    def __init__(
        self,
        dim: int,
        max_steps: int,
        *,
        rule: HaltingRule | None = None,
        ponder_cost: float = 0.01,
        slack: float = 0.01,
        bias: float = 1.0,
    ) -> None:
        super().__init__()
        if max_steps < 1:
            raise ValueError(f"HaltingUnit: max_steps ({max_steps}) must be at least 1")
        if not 0 <= slack < 1 or ponder_cost < 0:
            raise ValueError(f"HaltingUnit: slack ({slack}) must be in [0, 1), ponder_cost ({ponder_cost}) at least 0")
        self.rule = GravesHalting() if rule is None else rule
        self.max_steps = max_steps
        self.ponder_cost = ponder_cost
        self.slack = slack
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.tensor(float(bias)))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def init_state(self, valid: Bool[Tensor, "b l"], like: Float[Tensor, "b l d"]) -> HaltingState:
        """The initial halting state: every token except padding runs, with zero accumulated probability."""
        # float32: sums of probabilities are compared with a threshold near 1
        zeros = like.new_zeros(valid.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        return HaltingState(valid, zeros, zeros, zeros)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l"]:
        """The probability that each token halts at this step; in float32 at least, because steps are summed."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_disabled(x.device):
            return torch.sigmoid(F.linear(x.to(dtype), self.weight[None].to(dtype))[..., 0] + self.bias.to(dtype))

    def weigh(
        self, state: HaltingState, probability: Float[Tensor, "b l"], step: int
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of the states of step number `step`, and the halting state after it."""
        return self.rule.weigh(state, probability, slack=self.slack, last=step == self.max_steps - 1)

    def loss(self, state: HaltingState, valid: Bool[Tensor, "b l"]) -> Tensor:
        """The ponder cost: the mean over all tokens except padding."""
        # the number of steps has no gradient, it makes the value the paper's
        token_cost = torch.where(valid, state.steps + state.remainder, 0.0)
        return self.ponder_cost * token_cost.sum() / valid.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"{type(self.rule).__name__}, at most {self.max_steps} steps, ponder_cost={self.ponder_cost}"


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
            # with a state all steps are computed, because later tokens attend to each of them
            any_running = hides_values() or bool(halting_state.running.any())
            if not any_running and state is None:
                break
            inputs = StepInput(states, position_vectors, attention_states[step], cross_state, transition_states[step])
            if not any_running and self.halting.rule.freezes_state:
                # no token changes any more, but their keys have the signal of this step
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
        if not self.halting.rule.freezes_state:
            return AllTokens(ctx.positions)
        if not hides_values() and bool((halting_state.running == valid).all()):
            return AllTokens(ctx.positions)
        if ctx.watch is not no_watch or hides_values():
            return AllTokens(ctx.positions, halting_state.running)
        return TokenSubset(ctx.positions, halting_state.running)

    def _run_step(
        self, inputs: StepInput, ctx: Context, group: TokenGroup, halted_store: HaltedKVStore, step: int
    ) -> StepOutput:
        x = self.timing.add_signals(group.gather(inputs.states), group.gather(inputs.position_vectors), step)
        halt_probability = self.halting(x)
        group_ctx = group.context(ctx)
        # the state of cross-attention is the projected source, of which a subset has fewer rows
        is_subset = isinstance(group, TokenSubset)
        attention_state = inputs.attention_state
        cross_state = group.select_rows(inputs.cross_state)
        if isinstance(group, TokenSubset):
            attention_state = halted_store.state_for_group(attention_state, inputs.states, group, step)
        x, (attention_state, cross_state), loss = self.block.attend(x, group_ctx, (attention_state, cross_state))
        if self._tokenwise_transition:
            y, transition_state, extra = self.block.transition(x, group_ctx, inputs.transition_state)
        else:
            # a convolution sees its neighbors, halted ones too
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
