"""A mixer as somebody outside the package writes it, who knows no more of decoding than that a state is continued."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.nn.core import PADDING_SEGMENT, Chain, Context, ContiguousLayout, Layer, LayerOutput, Pointwise, State
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.residual import Residual


class FadingState(NamedTuple):
    """The sum so far of each row's current document, and the number of the document."""

    total: Tensor
    document: Tensor


class FadingSum(Layer):
    """A sum of projections of a document's tokens so far, in which older ones fade, channel by channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fade = nn.Parameter(torch.linspace(-1.0, 3.0, dim))

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        total = torch.zeros(batch, len(self.fade), device=device, dtype=dtype)
        return FadingState(total, torch.full((batch,), -2, device=device))

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        earlier = self.init_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        total, document = earlier
        documents = ctx.positions.segment_ids.expand(x.shape[:2])
        values, share, sums = self.value(x), self.fade.sigmoid(), []
        one_document = isinstance(ctx.positions.layout, ContiguousLayout)
        for column in range(x.shape[1]):
            if one_document:
                # a row of one document without padding, which begins with a sum of zeros
                total, document = torch.addcmul(values[:, column], total, share), documents[:, column]
            else:
                current = documents[:, column]
                is_token, goes_on = current != PADDING_SEGMENT, current == document
                summed = torch.where(goes_on[:, None], total * share, 0.0) + values[:, column]
                total = torch.where(is_token[:, None], summed, total)
                document = torch.where(is_token, current, document)
            sums.append(total)
        y = self.out(torch.stack(sums, 1).tanh())
        return LayerOutput(y, None if state is None else FadingState(total, document))


def mixer_model(dim: int = 16, depth: int = 2, vocab: int = 29) -> LanguageModel:
    """A language model of such layers."""
    blocks = (
        Chain(
            mixer=Residual(FadingSum(dim), pre_norm=nn.LayerNorm(dim)),
            ff=Residual(FeedForward(dim), pre_norm=nn.LayerNorm(dim)),
        )
        for _ in range(depth)
    )
    layers = {str(number): block for number, block in enumerate(blocks)}
    body = Chain(**layers, norm=Pointwise(nn.LayerNorm(dim)))
    return LanguageModel(TokenEmbedding(vocab, dim), body, ClassHead(dim, vocab))
