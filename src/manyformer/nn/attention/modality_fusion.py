"""Fusion of several modalities: joint tokens, cross-attention between them, or attention bottlenecks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
)
from manyformer.nn.runtime.training_hooks import UndecayedParameters

Sequences = Mapping[str, MemorySequence]
"""The sequence of each modality by its name."""


class Fusion(nn.Module, ABC):
    """Exchanges information between the sequences of several modalities, each of which keeps its length.

    A row that does not have a modality has only padding there, and its other sequences are those of a call without."""

    @abstractmethod
    def forward(self, sequences: Sequences, watch: WatchFn) -> dict[str, LayerOutput]:
        """The new vectors of each sequence; those of padding have no meaning."""


@final
class JointFusion(Fusion):
    """One layer over the tokens of all modalities, one after another (Kim et al. 2021, ViLT, arXiv:2102.03334)."""

    def __init__(self, body: Layer) -> None:
        super().__init__()
        self.body = body

    def forward(self, sequences: Sequences, watch: WatchFn) -> dict[str, LayerOutput]:
        # the sequences of a row are one document, so that every token sees all others
        joined = join_sequences(list(sequences.values()))
        y, _, loss = apply_layer(self.body, joined.y, Context(joined.positions, None, watch))
        parts = torch.split(y, [sequence.y.shape[1] for sequence in sequences.values()], dim=1)
        outputs = {name: LayerOutput(part) for name, part in zip(sequences, parts)}
        first = next(iter(sequences))
        # a loss of all sequences together is given once, with the first
        return outputs | {first: outputs[first]._replace(loss=loss)}


@final
class CrossFusion(Fusion):
    """Layers of each modality, whose tokens also attend to those of all others (Lu et al. 2019, section 2.1, figure 2).

    `make_layer` makes a layer of one modality, which finds the others in `ctx.memory`, None if there are none; each
    layer reads the others as they were before it. ViLBERT has two modalities; with more, the others are joined."""

    def __init__(self, names: Sequence[str], depth: int, make_layer: Callable[[int], Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: make_layer(number) for name in names}) for number in range(depth)
        )

    def forward(self, sequences: Sequences, watch: WatchFn) -> dict[str, LayerOutput]:
        outputs = {name: LayerOutput(sequence.y) for name, sequence in sequences.items()}
        for layers in self.layers:
            current = {name: sequence._replace(y=outputs[name].y) for name, sequence in sequences.items()}
            for name, sequence in current.items():
                others = [part for other, part in current.items() if other != name and part.y.shape[1]]
                # what the others were before this layer, whatever the order in which they are computed
                memory = join_sequences(others) if others else None
                output = apply_layer(layers[name], sequence.y, Context(sequence.positions, memory, watch))  # type: ignore[index]
                outputs[name] = output._replace(loss=outputs[name].loss + output.loss)
        return outputs


@final
class MemoryIfPresent(Layer):
    """`inner` on rows that have a memory to attend to, and zeros on those that have none."""

    def __init__(self, inner: Layer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            return LayerOutput(torch.zeros_like(x), state)
        output = self.inner(x, ctx, state)
        # rows that lack the modality attend to padding alone, of which nothing may come through
        y = output.y * has_tokens(ctx.memory.positions)[:, None, None]
        return LayerOutput(y, output.state, output.loss)


@final
class BottleneckFusion(Fusion, UndecayedParameters):
    """Layers of each modality that exchange information through a few tokens alone (Nagrani et al. 2021, section 3.2).

    In every layer from number `first` on, `tokens` bottleneck tokens follow the sequence of each modality, and their
    mean over the modalities that a row has goes on to the next layer (equations 8, 9). Layers before are separate."""

    undecayed = ("bottleneck",)

    def __init__(
        self, names: Sequence[str], depth: int, make_layer: Callable[[int], Layer], *, dim: int, tokens: int, first: int
    ) -> None:
        super().__init__()
        if not 0 <= first < depth:
            raise ValueError(f"BottleneckFusion: first ({first}) must be a layer from 0 to {depth - 1}")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: make_layer(number) for name in names}) for number in range(depth)
        )
        self.bottleneck = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.first = first

    def forward(self, sequences: Sequences, watch: WatchFn) -> dict[str, LayerOutput]:
        outputs = {name: LayerOutput(sequence.y) for name, sequence in sequences.items()}
        first = next(iter(sequences.values()))
        bottleneck = self.bottleneck.to(first.y.dtype).expand(first.y.shape[0], -1, -1)
        weights = _present_shares(sequences, first.y.dtype)
        for number, layers in enumerate(self.layers):
            messages = torch.zeros_like(bottleneck)
            for name, (_, positions) in sequences.items():
                sequence = MemorySequence(outputs[name].y, positions)
                if number >= self.first:
                    sequence = join_sequences([sequence, MemorySequence(bottleneck, _document(bottleneck))])
                output = apply_layer(layers[name], sequence.y, Context(sequence.positions, None, watch))  # type: ignore[index]
                length = positions.position_ids.shape[1]
                outputs[name] = output._replace(y=output.y[:, :length], loss=outputs[name].loss + output.loss)
                if number >= self.first:
                    messages = messages + output.y[:, length:] * weights[name]
            # the mean of what the modalities of a row have written to the tokens
            bottleneck = messages if number >= self.first else bottleneck
        return outputs


def join_sequences(sequences: Sequence[MemorySequence]) -> MemorySequence:
    """The tokens of all sequences, one after another; each keeps its positions and documents."""
    positions = [sequence.positions for sequence in sequences]
    joined = TokenPositions(
        torch.cat([part.position_ids for part in positions], 1), torch.cat([part.segment_ids for part in positions], 1)
    )
    return MemorySequence(torch.cat([sequence.y for sequence in sequences], 1), joined)


def has_tokens(positions: TokenPositions) -> Bool[Tensor, " b"]:
    """Whether each row has a token that is no padding."""
    return (positions.segment_ids != PADDING_SEGMENT).any(1)


def _present_shares(sequences: Sequences, dtype: torch.dtype) -> dict[str, Float[Tensor, "b 1 1"]]:
    """One divided by the number of modalities that a row has, and zero for those that it does not have."""
    present = torch.stack([has_tokens(positions) for _, positions in sequences.values()]).to(dtype)
    shares = present / present.sum(0).clamp(min=1)
    return {name: share[:, None, None] for name, share in zip(sequences, shares)}


def _document(x: Float[Tensor, "b l d"]) -> TokenPositions:
    """The positions of tokens that are one document in each row."""
    columns = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    return TokenPositions(columns, torch.zeros_like(columns))
