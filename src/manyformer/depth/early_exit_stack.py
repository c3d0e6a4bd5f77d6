"""Layers that a token need not pass all of: it leaves when it is sure, and is copied to the layers above."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    LayeredStack,
    LayerOutput,
    Pointwise,
    State,
    TokenPositions,
)
from manyformer.depth.exit_rules import ExitRule, ExitRuleInput, NeverExit, RandomExit, append_exit_layer


class EarlyExitState(NamedTuple):
    """The layers' states, and streams that were copied upwards but that upper layers have not looked at yet.

    `columns` tokens have come in all, of which each layer has taken in `filled`; `pending` has them all, where somebody
    leaves layers behind. Only what decodes token by token does (`manyformer.generate`): this layer itself never.
    """

    layers: list[State]
    columns: int
    filled: tuple[int, ...]
    pending: Float[Tensor, "b n d"] | None = None


@final
class EarlyExit(LayeredStack):
    """A `Chain` whose tokens may leave after any of its numbered layers (Elbayad et al. 2020; Schuster et al. 2022).

    `rule` says who leaves. To the layers above goes a copy of what a token left with: each makes keys and values of its
    own of it (Elbayad et al. 2020, section 3.1, equation 6), and whatever else it does of it is not used. Here every
    layer computes everything and copies replace what is not used: this defines what is right, and saves nothing.

    While training all pass all layers; with `draws` each of so many passes lets tokens leave at random ("mixed
    training", section 3.1). What comes out has one more channel: the number of the layer, from 1 on, that the token
    left after. Further layers of the chain, norms, are for all that leave. Watchers hear it as "depth". Raises
    ValueError for a chain whose other layers let tokens meet.
    """

    content_based = True

    def __init__(self, chain: Chain, rule: ExitRule, *, draws: int | None = None) -> None:
        super().__init__()
        numbered = [name for name, _ in chain.named_children() if name.isdigit()]
        others = [(name, layer) for name, layer in chain.named_children() if not name.isdigit()]
        for name, layer in others:
            if not isinstance(layer, Pointwise):
                raise ValueError(
                    f"nobody can leave early: beside its numbered layers the stack has '{name}', a "
                    f"{type(layer).__name__}, which is not for each token by itself"
                )
        for name, layer in chain.named_children():
            self.add_module(name, layer)
        self.rule, self.draws = rule, draws
        self.depth = len(numbered)
        self._numbered, self._others = numbered, [name for name, _ in others]

    @property
    def layers(self) -> list[Layer]:
        """The layers that tokens may leave after."""
        return [self._modules[name] for name in self._numbered]  # type: ignore[misc]

    @property
    def final_layers(self) -> list[Layer]:
        """What all that leave pass before classifiers read them."""
        return [self._modules[name] for name in self._others]  # type: ignore[misc]

    def classifier_input(self, x: Float[Tensor, "b l d"], ctx: Context) -> Float[Tensor, "b l d"]:
        """The stream as classifiers read it."""
        for layer in self.final_layers:
            x = layer(x, ctx).y
        return x

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        states = [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self.layers]
        return EarlyExitState(states, 0, (0,) * self.depth)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if self.training:
            return self._pass(x, ctx, state, NeverExit() if self.draws is None else RandomExit(self.depth))
        return self._pass(x, ctx, state, self.rule)

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        """All that is learned from, in the same form as what `forward` gives, which comes last.

        That is what comes out of each layer; in mixed training what comes out of each random pass.
        """
        if self.draws is not None:
            passes = [self(x, ctx) for _ in range(self.draws if self.training else 1)]
            return [out._replace(loss=out.loss / len(passes)) for out in passes]
        outs: list[LayerOutput] = []
        stream = x
        for number, layer in enumerate(self.layers, 1):
            stream, _, loss = layer(stream, ctx)
            outs.append(LayerOutput(append_exit_layer(self.classifier_input(stream, ctx), number), None, loss))
        return outs if self.training else [*outs, self(x, ctx)._replace(loss=0.0)]

    def _pass(self, x: Float[Tensor, "b l d"], ctx: Context, state: State, rule: ExitRule) -> LayerOutput:
        before = None if state is None else self.caught_up(state, ctx)
        plan = rule.begin(ctx, x)
        depth = torch.full(x.shape[:2], self.depth, device=x.device)
        loss: Tensor | float = 0.0
        after: list[State] = []
        pos = ctx.positions.position_ids.expand(x.shape[0], -1)
        for number, layer in enumerate(self.layers, 1):
            y, new, extra = layer(x, ctx, None if before is None else before.layers[number - 1])
            y = torch.where((depth < number)[..., None], x, y)
            if number < self.depth:
                leaves, plan, _ = rule(ExitRuleInput(number, y, x, self.classifier_input(y, ctx), pos), plan)
                depth = torch.where(leaves & (depth > number), number, depth)
            x, loss = y, loss + extra
            after.append(new)
        ctx.watch(self, "depth", depth)
        y = torch.cat([self.classifier_input(x, ctx), depth[..., None].to(x.dtype)], dim=-1)
        return LayerOutput(y, None if before is None else _taken(before, after, x.shape[1]), loss)

    def caught_up(self, state: EarlyExitState, ctx: Context) -> EarlyExitState:
        """The state after every layer has taken in what was copied to it."""
        if state.pending is None or min(state.filled) == state.columns:
            return state
        layers = list(state.layers)
        for number, (layer, done) in enumerate(zip(self.layers, state.filled)):
            if done < state.columns:
                missed = state.pending[:, done : state.columns]
                place = plain_place(missed.shape[0], done, state.columns, missed.device)
                layers[number] = layer(missed, Context(place, ctx.memory), layers[number]).state
        return EarlyExitState(layers, state.columns, (state.columns,) * self.depth, state.pending)

    def extra_repr(self) -> str:
        return f"{self.depth} layers" + ("" if self.draws is None else f", {self.draws} random passes in training")


def _taken(before: EarlyExitState, layers: list[State], columns: int) -> EarlyExitState:
    total = before.columns + columns
    # copies are only kept by those who leave layers behind, and these tokens have passed all
    return EarlyExitState(layers, total, (total,) * len(before.filled))


def plain_place(rows: int, begin: int, end: int, device: torch.device) -> TokenPositions:
    """Where tokens `begin` to `end` of rows are that are one plain document each."""
    pos = torch.arange(begin, end, device=device).expand(rows, -1)
    return TokenPositions(
        pos, torch.zeros((), dtype=torch.long, device=device).expand(rows, end - begin), ContiguousLayout(begin)
    )


def split_exit_layer(y: Float[Tensor, "*b m"]) -> tuple[Float[Tensor, "*b d"], Int[Tensor, "*b"]]:
    """What a token left with, and the number of the layer that it left after."""
    return y[..., :-1], y[..., -1].long()


def drop_exit_layer(streams: Sequence[Float[Tensor, "b l m"]]) -> list[Float[Tensor, "b l d"]]:
    """Streams without the channel that says where they left."""
    return [stream[..., :-1] for stream in streams]


def mean_depth(depth: Int[Tensor, "b l"], counted: Bool[Tensor, "b l"]) -> float:
    """The layers that the counted tokens passed, on average."""
    return float(depth[counted].double().mean())
