"""Prediction of several tokens: losses of the tokens after the next one, and the layers with which a model drafts them.

The layers are used in training, and in decoding where they draft tokens (`manyformer.inference.generate.drafters`)."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.models.auxiliary_losses import AuxiliaryLoss, LossInputs, mean_loss, targets_two_ahead
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    RecordModule,
    State,
    TokenPositions,
)
from manyformer.nn.runtime.training_hooks import OptimizerHints, OptionalOnLoad


class DepthLoss(NamedTuple):
    """The mean loss of the tokens at one distance, and what the layer that predicts them adds by itself."""

    tokens: Tensor
    layer: Tensor | float = 0.0


class AheadLoss(AuxiliaryLoss, OptionalOnLoad):
    """The mean of the losses of the `tokens` tokens after the next one, times `weight`: L_next + weight / D sum_k L_k.

    L_k is the mean over all tokens that have a target k + 1 tokens ahead in their document. With `weight` 0 nothing is
    computed, and training is that of the model without it."""

    def __init__(self, tokens: int, weight: float) -> None:
        super().__init__()
        self.tokens = tokens
        self.weight = weight

    @abstractmethod
    def depth_losses(self, hidden: Float[Tensor, "b l d"], inputs: LossInputs) -> Iterator[DepthLoss]:
        """The losses from the nearest token to the farthest, one after another: each has the logits of a vocabulary."""

    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], inputs: LossInputs) -> Tensor:
        total = torch.zeros_like(inputs.loss.total)
        if not self.weight:
            # with distributed training every parameter must receive a gradient
            return total + nothing_of(self)
        for loss in self.depth_losses(streams[-1], inputs):
            total = total + self.weight / self.tokens * loss.tokens + loss.layer
        return total

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, weight={self.weight:g}"


def nothing_of(module: nn.Module) -> Tensor | float:
    """Zero, with a gradient of zero for every parameter of `module`."""
    return 0.0 * sum((weight.sum() for weight in module.parameters()), 0.0)


@final
class SharedAhead(AheadLoss):
    """The logits of the next token, scored against the tokens after it as well: no parameters, and nothing to draft.

    A loss of modded-nanogpt (2025), where token k + 1 has the weight 2^-k, which ends during training; here all tokens
    have one weight, which stays."""

    def depth_losses(self, hidden: Float[Tensor, "b l d"], inputs: LossInputs) -> Iterator[DepthLoss]:
        for targets in _targets_ahead(inputs, self.tokens):
            yield DepthLoss(mean_loss(inputs.head, hidden, targets, inputs.label_smoothing))


@final
class AheadHead(RecordModule):
    """A layer and a norm on the last hidden states of the model: the stream from which one token ahead is predicted."""

    def __init__(self, block: Layer, norm: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.norm = norm

    def forward(self, hidden: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        y, next_state, loss = self.block(hidden, ctx, state)
        return LayerOutput(self.norm(y), next_state, loss)


@final
class ParallelAhead(AheadLoss):
    """One layer for each token ahead, side by side on the hidden states of the model (Gloeckle et al. 2024).

    arXiv:2404.19737, section 2: token i + 1 + k is predicted from head(norm_k(Block_k(h_i))) with the model's output
    matrix. The paper takes these layers from the model, which has as many fewer, and reads its stream before the last
    norm, which all heads share; here they are added, read the state after that norm, and have a norm of their own."""

    def __init__(self, blocks: Sequence[Layer], norms: Sequence[nn.Module], weight: float) -> None:
        super().__init__(len(blocks), weight)
        self.heads = nn.ModuleList(AheadHead(block, norm) for block, norm in zip(blocks, norms, strict=True))

    def in_order(self) -> list[AheadHead]:
        """The layers of the tokens ahead, the nearest first."""
        return list(self.heads)  # type: ignore[arg-type]

    def depth_losses(self, hidden: Float[Tensor, "b l d"], inputs: LossInputs) -> Iterator[DepthLoss]:
        ctx = Context(inputs.ctx.positions)
        for head, targets in zip(self.in_order(), _targets_ahead(inputs, self.tokens), strict=True):
            y, _, layer_loss = head(hidden, ctx)
            yield DepthLoss(mean_loss(inputs.head, y, targets, inputs.label_smoothing), layer_loss)


@final
class AheadLayer(RecordModule, OptimizerHints):
    """One module of DeepSeek-V3's chain: u = W [norm_e(token) ; norm_h(hidden)], y = norm(Block(u)) (section 2.2).

    `tokens` are the embeddings of the tokens that precede the predicted ones, `hidden` the states one token before."""

    hidden_matrices = ("merge.weight",)

    def __init__(self, dim: int, block: Layer, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.norm = norms
        self.merge = nn.Linear(2 * dim, dim, bias=False)
        nn.init.xavier_uniform_(self.merge.weight)
        self.block = block

    def forward(
        self, tokens: Float[Tensor, "b l d"], hidden: Float[Tensor, "b l d"], ctx: Context, state: State = None
    ) -> LayerOutput:
        x = self.merge(torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=-1))
        y, next_state, loss = self.block(x, ctx, state)
        return LayerOutput(self.norm(y), next_state, loss)


class ChainStates(NamedTuple):
    """The states of one module of a chain, in the last columns of rows, and which of them belong to one document.

    The module of depth k has none for the first k columns. `loss` is what its layer adds by itself."""

    hidden: Float[Tensor, "b n d"]
    is_known: Bool[Tensor, "b n"]
    loss: Tensor | float


@final
class SequentialAhead(AheadLoss):
    """A chain of modules, each of which reads the states of the one before and one token more (DeepSeek-V3, 2024).

    arXiv:2412.19437, section 2.2. At depth k the state of token i and the embedding of token i + k give the state from
    which token i + k + 1 is predicted. Here it stands in the column of token j = i + k, at that token's position, so
    that module k reads the state of module k - 1 one column before: the first k tokens of a document have none, and are
    padding to its layer. The chain begins with the state after the model's last norm, as in released weights."""

    def __init__(self, dim: int, blocks: Sequence[Layer], norms: Sequence[Sequence[nn.Module]], weight: float) -> None:
        super().__init__(len(blocks), weight)
        self.layers = nn.ModuleList(AheadLayer(dim, block, three) for block, three in zip(blocks, norms, strict=True))

    def in_order(self) -> list[AheadLayer]:
        """The modules of the chain."""
        return list(self.layers)  # type: ignore[arg-type]

    def depth_losses(self, hidden: Float[Tensor, "b l d"], inputs: LossInputs) -> Iterator[DepthLoss]:
        for states in self.chain(hidden, inputs.embedded, inputs.ctx.positions):
            # the column of token j has the target j + 1, as in the model itself
            targets = inputs.targets[:, -states.hidden.shape[1] :].masked_fill(~states.is_known, IGNORE_INDEX)
            yield DepthLoss(mean_loss(inputs.head, states.hidden, targets, inputs.label_smoothing), states.loss)
        for layer in self.in_order()[hidden.shape[1] - 1 :]:
            # rows of fewer tokens than the chain is long
            yield DepthLoss(inputs.loss.total * 0.0, nothing_of(layer))

    def chain(
        self, hidden: Float[Tensor, "b l d"], tokens: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> Iterator[ChainStates]:
        """The states of each module, as far as rows have tokens, from the model's last ones and its embedded tokens."""
        is_known = positions.segment_ids != PADDING_SEGMENT
        for layer in self.in_order()[: hidden.shape[1] - 1]:
            is_known = is_known[:, :-1] & (positions.segment_ids[:, 1:] == positions.segment_ids[:, :-1])
            positions = positions.columns(1, hidden.shape[1])
            tokens = tokens[:, 1:]
            hidden, _, loss = layer(tokens, hidden[:, :-1], Context(_without_unknown(positions, is_known)))
            yield ChainStates(hidden, is_known, loss)


def _targets_ahead(inputs: LossInputs, count: int) -> Iterator[Int[Tensor, "b l"]]:
    """The targets two tokens ahead, three tokens ahead, and so on, of the same document."""
    targets = inputs.targets
    for _ in range(count):
        targets = targets_two_ahead(targets, inputs.ctx.positions.segment_ids)
        yield targets


def _without_unknown(positions: TokenPositions, is_known: Bool[Tensor, "b l"]) -> TokenPositions:
    """The positions, with tokens that have no state as padding: a state of another document stands beside them."""
    if isinstance(positions.layout, ContiguousLayout):
        # a single document, of which the first columns are gone already
        return positions
    segment_ids = torch.where(is_known, positions.segment_ids, PADDING_SEGMENT)
    return TokenPositions(positions.position_ids, segment_ids, roles=positions.roles, part_ids=positions.part_ids)
