"""After which layer each token should have left, knowing what was right: the lessons of learned rules."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX
from manyformer.core import TokenPositions
from manyformer.models.output_head import OutputHead


class ExitOracle(ABC):
    """How well each layer does on each token."""

    @abstractmethod
    def scores(self, logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        """The score of the layer that these logits come from; those of ignored targets mean nothing."""


@final
@dataclass(frozen=True)
class LikelihoodOracle(ExitOracle):
    """The log-probability of what was right (Elbayad et al. 2020, equations 9 and 14)."""

    def scores(self, logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        # ignored targets must index something
        right = logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return right - logits.logsumexp(-1)


@final
@dataclass(frozen=True)
class CorrectnessOracle(ExitOracle):
    """1 where what was right is likeliest, else 0 (Elbayad et al. 2020, equations 10 and 16)."""

    def scores(self, logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        return (logits.argmax(-1) == targets).to(logits.dtype)


@torch.no_grad()
def layer_scores(
    oracle: ExitOracle, streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead, targets: Int[Tensor, "b l"]
) -> Float[Tensor, "n b l"]:
    """The scores of all layers, whose streams say which they are of."""
    return torch.stack([oracle.scores(head(stream).float(), targets) for stream in streams])


@torch.no_grad()
def best_layers(
    scores: Float[Tensor, "n b l"],
    positions: TokenPositions,
    counted: Bool[Tensor, "b l"],
    *,
    smoothing: float,
    penalty: float,
) -> Int[Tensor, "b l"]:
    """The layer, from 1 on, with the best score less `penalty` times its number, the lowest of equals.

    Scores are first smoothed over the tokens of a document by exp(-|t - t'|^2 / `smoothing`): 0 leaves each by itself,
    infinity gives all the sum (Elbayad et al. 2020, equations 14 to 17; in (16) the counts are those of t', not of t).
    Tokens that are not counted count for nobody.
    """
    smoothed = torch.einsum(
        "nbs,bls->nbl", scores.masked_fill(~counted, 0.0), smoothing_kernel(positions, scores, smoothing)
    )
    numbers = torch.arange(1, len(scores) + 1, device=scores.device)
    return (smoothed - penalty * numbers[:, None, None]).argmax(0) + 1


def smoothing_kernel(
    positions: TokenPositions, like: Float[Tensor, "n b l"], smoothing: float
) -> Float[Tensor, "b l s"]:
    """How much each token s counts for each other one l of its document."""
    rows = like.shape[1]
    pos, seg = positions.position_ids.expand(rows, -1), positions.segment_ids.expand(rows, -1)
    same = seg[:, :, None] == seg[:, None, :]
    apart = (pos[:, :, None] - pos[:, None, :]).to(like.dtype) ** 2
    if math.isinf(smoothing):
        return same.to(like.dtype)
    return torch.where(same, torch.exp(-apart / smoothing) if smoothing else (apart == 0).to(like.dtype), 0.0)


@torch.no_grad()
def agreement(streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead) -> Float[Tensor, "b l n"]:
    """For each layer but the last, 1 where its likeliest class is that of the last (Schuster et al. 2022, eq. 9)."""
    last = head(streams[-1]).argmax(-1)
    return torch.stack([(head(stream).argmax(-1) == last).float() for stream in streams[:-1]], dim=-1)


def mean_where(values: Float[Tensor, "*n"], counted: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """The mean of those that count."""
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def counted_in(targets: Int[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
    """The tokens whose prediction counts."""
    return targets != IGNORE_INDEX


def binary_cost(logits: Float[Tensor, "b l n"], wanted: Float[Tensor, "b l n"]) -> Float[Tensor, "b l"]:
    """The cross entropy of yes or no, on average over layers."""
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(-1)
