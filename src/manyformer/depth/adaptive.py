"""Each token as often as it needs: the Universal Transformer with adaptive computation time."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.attention import Attention
from manyformer.core import Context, Layer, LayerOutput, State, no_watch
from manyformer.depth.halted_kv import HaltedKVStore
from manyformer.depth.halting import HaltingState, HaltingUnit
from manyformer.depth.token_subset import AllTokens, TokenGroup, TokenSubset
from manyformer.depth.universal import UniversalBlock, real_tokens, start_steps, unpack_state
from manyformer.feedforward import ChunkedLayer, FeedForward, GatedFeedForward
from manyformer.position import PositionStepSignal
from manyformer.sources import HaltedTokenSource


class StepInput(NamedTuple):
    """What a step begins with: the states of all tokens, the vectors of their positions, and what is remembered."""

    states: Float[Tensor, "b l d"]
    where: Float[Tensor, "b l d"]
    attention_state: State
    cross_state: State
    transition_state: State


class StepOutput(NamedTuple):
    """What a step gives for the tokens of a group: new states, and the probability that each halts."""

    states: Float[Tensor, "r n d"]
    halt_probability: Float[Tensor, "r n"]
    attention_state: State
    cross: State
    work: State
    loss: Tensor | float


@final
class AdaptiveComputation(Layer):
    """`block` until each token halts (Dehghani et al. 2019, section 2.2; Graves 2016), at most `halting.max_steps`
    times.

    The signals of position and step are added before each step, and the probability of halting is that of the stream
    after them. A token that has halted is not computed any more: it is left out of its row until all have halted. Its
    state stays as it is, and others go on looking at it, also tokens that come later, as at a state of every step: with
    the signals of that step, as in the equations. Where the block's branches take the bare stream (post-norm), keys of
    such a state are projected once and shifted from step to step; else at every step. Transitions in which tokens meet,
    such as convolutions, take whole rows, where the neighbours that have halted stand as they are.

    Watched, it reports as "steps" how many each token took, (b, l), and as "halting" the probabilities, (b, l, steps),
    zero after the last; then everything is computed for all tokens. Raises ValueError for attention whose keys do not
    follow from the stream alone.
    """

    content_based = True

    def __init__(self, block: UniversalBlock, timing: PositionStepSignal, halting: HaltingUnit) -> None:
        super().__init__()
        attention = block.attention.inner
        assert isinstance(attention, Attention)
        if (
            not isinstance(attention.source, HaltedTokenSource)
            or attention.kernel.recurrent
            or attention.kernel.tied_qk
        ):
            raise ValueError(
                "AdaptiveComputation: keys of tokens that halt must be kept: Attention(..., Softmax(), source=Still())"
            )
        # a table of too few steps says so
        timing.steps(halting.max_steps - 1)
        self.block, self.timing, self.halting = block, timing, halting
        self._apart = isinstance(block.transition.inner, FeedForward | GatedFeedForward | ChunkedLayer)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return start_steps(self.block, self.halting.max_steps, batch, capacity=capacity, device=device, dtype=dtype)

    # how often it runs depends on the numbers
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        memory, real = unpack_state(self.block, x, state, self.halting.max_steps), real_tokens(ctx, x)
        tally, where = self.halting.begin(real, x), self.timing.positions(x, ctx.positions)
        shelf = HaltedKVStore(self.block.attention, self.timing, ctx.positions, real)
        states, mixed, loss = x, torch.zeros_like(x), torch.zeros((), device=x.device)
        chances: list[Tensor] = []
        for step in range(self.halting.max_steps):
            if not (running := bool(tally.running.any())) and state is None:
                break
            before = StepInput(states, where, memory.own[step], memory.cross, memory.work[step])
            if not running and self.halting.rule.freezes_state:
                memory.own[step], memory.work[step] = self._stand(before, ctx, shelf, step)
                continue
            group = self._group(ctx, tally, real)
            after = self._step(before, ctx, group, shelf, step)
            states, chance = (
                group.scatter(states, after.states),
                group.scatter(torch.zeros_like(tally.probability_sum), after.halt_probability),
            )
            weights, tally = self.halting.weigh(tally, chance, step)
            mixed = self.halting.rule.mix(mixed, states, weights)
            memory = memory._replace(cross=after.cross)
            memory.own[step], memory.work[step] = after.attention_state, after.work
            chances.append(chance)
            loss = loss + after.loss
        self._report(ctx, tally, chances)
        loss = loss + self.halting.loss(tally, real)
        return LayerOutput(mixed.to(x.dtype), None if state is None else memory, loss)

    def _group(self, ctx: Context, tally: HaltingState, real: Bool[Tensor, "b l"]) -> TokenGroup:
        """The tokens that are computed."""
        if not self.halting.rule.freezes_state or bool((tally.running == real).all()):
            return AllTokens(ctx.positions)
        if ctx.watch is not no_watch:
            return AllTokens(ctx.positions, tally.running)
        return TokenSubset(ctx.positions, tally.running)

    def _step(self, before: StepInput, ctx: Context, group: TokenGroup, shelf: HaltedKVStore, step: int) -> StepOutput:
        x = self.timing.at_step(group.gather(before.states), group.gather(before.where), step)
        chance = self.halting(x)
        inner, some = group.context(ctx), isinstance(group, TokenSubset)
        own = before.attention_state
        if isinstance(group, TokenSubset):
            own = shelf.beside(before.attention_state, before.states, group, step)
        x, (own, cross), loss = self.block.attend(x, inner, (own, group.select_rows(before.cross_state)))
        if self._apart:
            y, work, extra = self.block.transition(x, inner, before.transition_state)
        else:
            y, work, extra = self.block.transition(group.scatter(before.states, x), ctx, before.transition_state)
            y = group.gather(y)
        return StepOutput(y, chance, own, before.cross_state if some else cross, work, loss + extra)

    def _stand(self, before: StepInput, ctx: Context, shelf: HaltedKVStore, step: int) -> tuple[State, State]:
        """What is remembered of a step in which no token runs, for tokens that come later."""
        own = shelf.remember(before.attention_state, before.states, ctx, step)
        if self._apart:
            return own, before.transition_state
        return own, self.block.transition(before.states, ctx, before.transition_state).state

    def _report(self, ctx: Context, tally: HaltingState, chances: list[Tensor]) -> None:
        if ctx.watch is not no_watch:
            ctx.watch(self, "steps", tally.steps)
            ctx.watch(self, "halting", torch.stack(chances, -1))
