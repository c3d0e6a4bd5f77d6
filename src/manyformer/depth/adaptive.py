"""Each token as often as it needs: the Universal Transformer with adaptive computation time."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.attention import Attention
from manyformer.core import Context, Layer, Out, State, ignore
from manyformer.depth.halting import Halting, Tally
from manyformer.depth.shelf import Shelf
from manyformer.depth.some import Everybody, Group, Some
from manyformer.depth.universal import Block, begin, real_tokens, start_steps
from manyformer.feedforward import Chunked, FeedForward, GatedFeedForward
from manyformer.position import Timing
from manyformer.sources import Still


class Before(NamedTuple):
    """What a step begins with: the states of all tokens, the vectors of their positions, and what is remembered."""

    states: Float[Tensor, "b l d"]
    where: Float[Tensor, "b l d"]
    own: State
    cross: State
    work: State


class After(NamedTuple):
    """What a step gives for the tokens of a group: new states, and the probability that each halts."""

    states: Float[Tensor, "r n d"]
    chance: Float[Tensor, "r n"]
    own: State
    cross: State
    work: State
    loss: Tensor | float


@final
class Adaptive(Layer):
    """`block` until each token halts (Dehghani et al. 2019, section 2.2; Graves 2016), at most `halting.most` times.

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

    by_content = True

    def __init__(self, block: Block, timing: Timing, halting: Halting) -> None:
        super().__init__()
        attention = block.attention.inner
        assert isinstance(attention, Attention)
        if not isinstance(attention.source, Still) or attention.kernel.folds or attention.kernel.shares:
            raise ValueError(
                "Adaptive: keys of tokens that halt must be kept: Attention(..., Softmax(), source=Still())"
            )
        # a table of too few steps says so
        timing.steps(halting.most - 1)
        self.block, self.timing, self.halting = block, timing, halting
        self._apart = isinstance(block.transition.inner, FeedForward | GatedFeedForward | Chunked)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return start_steps(self.block, self.halting.most, batch, capacity=capacity, device=device, dtype=dtype)

    # how often it runs depends on the numbers
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        memory, real = begin(self.block, x, state, self.halting.most), real_tokens(ctx, x)
        tally, where = self.halting.begin(real, x), self.timing.positions(x, ctx.place)
        shelf = Shelf(self.block.attention, self.timing, ctx.place, real)
        states, mixed, loss = x, torch.zeros_like(x), torch.zeros((), device=x.device)
        chances: list[Tensor] = []
        for step in range(self.halting.most):
            if not (running := bool(tally.running.any())) and state is None:
                break
            before = Before(states, where, memory.own[step], memory.cross, memory.work[step])
            if not running and self.halting.rule.freezes:
                memory.own[step], memory.work[step] = self._stand(before, ctx, shelf, step)
                continue
            group = self._group(ctx, tally, real)
            after = self._step(before, ctx, group, shelf, step)
            states, chance = group.put(states, after.states), group.put(torch.zeros_like(tally.spent), after.chance)
            weights, tally = self.halting.weigh(tally, chance, step)
            mixed = self.halting.rule.mix(mixed, states, weights)
            memory = memory._replace(cross=after.cross)
            memory.own[step], memory.work[step] = after.own, after.work
            chances.append(chance)
            loss = loss + after.loss
        self._report(ctx, tally, chances)
        loss = loss + self.halting.loss(tally, real)
        return Out(mixed.to(x.dtype), None if state is None else memory, loss)

    def _group(self, ctx: Context, tally: Tally, real: Bool[Tensor, "b l"]) -> Group:
        """The tokens that are computed."""
        if not self.halting.rule.freezes or bool((tally.running == real).all()):
            return Everybody(ctx.place)
        if ctx.watch is not ignore:
            return Everybody(ctx.place, tally.running)
        return Some(ctx.place, tally.running)

    def _step(self, before: Before, ctx: Context, group: Group, shelf: Shelf, step: int) -> After:
        x = self.timing.at_step(group.take(before.states), group.take(before.where), step)
        chance = self.halting(x)
        inner, some = group.context(ctx), isinstance(group, Some)
        own = before.own
        if isinstance(group, Some):
            own = shelf.beside(before.own, before.states, group, step)
        x, (own, cross), loss = self.block.look(x, inner, (own, group.rows(before.cross)))
        if self._apart:
            y, work, extra = self.block.transition(x, inner, before.work)
        else:
            y, work, extra = self.block.transition(group.put(before.states, x), ctx, before.work)
            y = group.take(y)
        return After(y, chance, own, before.cross if some else cross, work, loss + extra)

    def _stand(self, before: Before, ctx: Context, shelf: Shelf, step: int) -> tuple[State, State]:
        """What is remembered of a step in which no token runs, for tokens that come later."""
        own = shelf.remember(before.own, before.states, ctx, step)
        if self._apart:
            return own, before.work
        return own, self.block.transition(before.states, ctx, before.work).state

    def _report(self, ctx: Context, tally: Tally, chances: list[Tensor]) -> None:
        if ctx.watch is not ignore:
            ctx.watch(self, "steps", tally.steps)
            ctx.watch(self, "halting", torch.stack(chances, -1))
