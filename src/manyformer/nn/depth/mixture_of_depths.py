"""Mixture-of-Depths: only the tokens of a document that a router prefers pass through a block of layers."""

from collections import defaultdict
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
)
from manyformer.nn.runtime.exact_shares import ceil_share, ceil_shares
from manyformer.nn.runtime.handwritten_gradient import hides_values
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.training_hooks import OptimizerHints

DepthRouting = Literal["top-k", "predictor"]
"""Who chooses tokens after training: the router among all of a document, or a predictor that sees one token."""

PREDICTION_WEIGHT = 0.01
"""Weight of the predictor's loss, which reaches no other weights."""


class ChosenTokens(NamedTuple):
    """The chosen tokens of each row, in order and packed to the left: their columns, and which entries are tokens."""

    columns: Int[Tensor, "b n"]
    valid: Bool[Tensor, "b n"]


@final
class MixtureOfDepths(Layer, OptimizerHints):
    """A block of layers for the tokens whose scores r = w x are the largest of their document (Raposo et al. 2024).

    arXiv:2404.02258, section 3: of n tokens, ceil(`share` n) become x + r (block(x) - x), where the block's attention
    sees chosen tokens alone; the others stay x. The choice depends on later tokens, so a text cannot be generated with
    it: section 3.5 trains a small predictor of each token's being chosen, on its detached stream, and with `routing`
    "predictor" this decides outside training. With "top-k" nothing can be decoded from a state. The state of the block
    holds the chosen tokens. Raises ValueError for a share that is not above 0 and at most 1.
    """

    content_based = True
    # it chooses tokens as the router does
    adamw_weights = ("predictor.0.weight",)

    def __init__(self, block: Layer, dim: int, *, share: float = 0.125, routing: DepthRouting = "predictor") -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"MixtureOfDepths: share ({share}) must be above 0 and at most 1")
        self.block = block
        self.share = share
        self.routing = routing
        self.router = nn.Linear(dim, 1, bias=False)
        self.predictor = nn.Sequential(nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, 1))

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        if self.routing == "top-k":
            raise ValueError("MixtureOfDepths: routing 'top-k' needs all tokens of a document at once; use 'predictor'")
        return self.block.init_state(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        scores = self.router(x)[..., 0]
        # detached: the predictor follows the router, and must not shape the stream
        prediction = self.predictor(x.detach())[..., 0]
        uses_top = self.training or self.routing == "top-k"
        if uses_top and state is not None:
            raise ValueError("MixtureOfDepths: the choice of training needs all tokens at once, without a state")
        valid = (ctx.positions.segment_ids != PADDING_SEGMENT).expand(scores.shape)
        loss: Tensor | float = 0.0
        # a choice of the forward pass, which a recomputed one must not make anew
        chosen = choose_once(lambda: valid & (prediction > 0))
        if state is None:
            best = choose_once(lambda: top_of_documents(scores.detach(), ctx.positions, self.share))
            losses = F.binary_cross_entropy_with_logits(prediction, best.to(prediction.dtype), reduction="none")
            loss = PREDICTION_WEIGHT * (losses * valid).sum() / valid.sum().clamp(min=1)
            chosen = best if uses_top else chosen
        ctx.watch(self, "chosen", chosen)
        tokens = pack_chosen(chosen, _width_of_best(ctx.positions, x.shape[1], self.share) if uses_top else None)
        if not tokens.columns.shape[1]:
            # the router still takes part in the sum, with a gradient of zero
            return LayerOutput(x + 0.0 * scores[..., None], state, loss)
        selected = _gather(x, tokens)
        positions = packed_positions(ctx.positions, tokens)
        if ctx.watch is no_watch or state is not None:
            watch = ctx.watch
        else:
            watch = _watch_all_tokens(ctx.watch, tokens, x)
        y, next_state, block_loss = self.block(selected, Context(positions, ctx.memory, watch), state)
        # entries without a token get the weight zero: they point at columns of tokens that are not chosen
        weights = (scores.gather(1, tokens.columns) * tokens.valid)[..., None]
        index = tokens.columns[..., None].expand(selected.shape)
        # x + r (block(x) - x) by one sum, in which all other tokens keep their vectors
        return LayerOutput(x.scatter_add(1, index, weights * (y - selected)), next_state, loss + block_loss)

    def extra_repr(self) -> str:
        return f"share={self.share:g}, routing={self.routing}"


def top_of_documents(scores: Float[Tensor, "b l"], positions: TokenPositions, share: float) -> Bool[Tensor, "b l"]:
    """Whether each token is among the ceil(`share` n) of the largest scores of its document of n tokens.

    Of equal scores the earlier one comes first; padding is never chosen."""
    segments = positions.segment_ids.expand(scores.shape)
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    # two stable sorts: by document, and by score within a document
    order = by_score.gather(1, segments.gather(1, by_score).argsort(dim=1, stable=True))
    sorted_segments = segments.gather(1, order)
    column = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    is_first = F.pad(sorted_segments[:, 1:] != sorted_segments[:, :-1], (1, 0), value=True)
    first = torch.where(is_first, column, 0).cummax(1).values
    # the next document's first column, or the end of the row
    is_last = F.pad(is_first[:, 1:], (0, 1), value=True)
    end = torch.where(is_last, column + 1, scores.shape[1]).flip(1).cummin(1).values.flip(1)
    counts = ceil_shares(share, end - first)
    chosen = (column - first < counts) & (sorted_segments != PADDING_SEGMENT)
    return torch.zeros_like(chosen).scatter(1, order, chosen)


def _width_of_best(positions: TokenPositions, length: int, share: float) -> int | None:
    """The most tokens that `top_of_documents` chooses in a row, where the layout says so; a GPU would be waited for."""
    if isinstance(positions.layout, ContiguousLayout):
        return ceil_share(share, length)
    if isinstance(positions.layout, PackedLayout):
        widths: defaultdict[int, int] = defaultdict(int)
        for row, start, stop in positions.layout.documents:
            widths[row] += ceil_share(share, stop - start)
        return max(widths.values(), default=0)
    return None


def pack_chosen(chosen: Bool[Tensor, "b l"], width: int | None) -> ChosenTokens:
    """The chosen tokens of each row, in `width` columns: as many as a row has at most, None to count them."""
    if width is None and hides_values():
        width = chosen.shape[1]
    width = int(chosen.sum(1).max()) if width is None else width
    # a stable sort keeps the chosen tokens in their order
    columns = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return ChosenTokens(columns, chosen.gather(1, columns))


def packed_positions(positions: TokenPositions, tokens: ChosenTokens) -> TokenPositions:
    """The positions of chosen tokens, which are their positions among all tokens; the other entries are padding."""
    # no layout: the positions of chosen tokens have gaps
    position_ids, segment_ids, token_ids = (
        None if ids is None else ids.expand(tokens.columns.shape[0], -1).gather(1, tokens.columns)
        for ids in (positions.position_ids, positions.segment_ids, positions.token_ids)
    )
    assert position_ids is not None
    assert segment_ids is not None
    padded_ids = torch.where(tokens.valid, segment_ids, PADDING_SEGMENT)
    return TokenPositions(position_ids, padded_ids, token_ids=token_ids)


def _watch_all_tokens(watch: WatchFn, tokens: ChosenTokens, x: Float[Tensor, "b l d"]) -> WatchFn:
    """`watch` with weights of pairs of chosen tokens as those of all pairs, zero where a token is not chosen."""
    length = x.shape[1]
    width = tokens.columns.shape[1]
    selection = F.one_hot(tokens.columns, length) * tokens.valid[..., None]

    def watch_all(module: nn.Module, name: str, value: Tensor) -> None:
        if name == "weights" and value.shape[-2:] == (width, width):
            # (b, h, n, n) to (b, h, l, l): S' w S with the 0-1 matrix S that packs the rows
            value = selection.to(value.dtype).mT[:, None] @ value @ selection.to(value.dtype)[:, None]
        watch(module, name, value)

    return watch_all


def _gather(x: Float[Tensor, "b l d"], tokens: ChosenTokens) -> Float[Tensor, "b n d"]:
    return x.gather(1, tokens.columns[..., None].expand(*tokens.columns.shape, x.shape[-1]))
