"""Oracle exit layers computed from the targets: the training labels of learned exit rules."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.models.exit_classifiers import exit_logits
from manyformer.models.head import OutputHead

ExitOracle = Callable[[Float[Tensor, "b l v"], Int[Tensor, "b l"]], Float[Tensor, "b l"]]
"""From the logits of a layer and the targets to the score of each prediction, undefined for ignored targets."""


def target_log_probability(logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """The log-probability of the target (Elbayad et al. 2020, equations 9 and 14)."""
    # ignored targets are negative and need a valid index
    target_logits = logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return target_logits - logits.logsumexp(-1)


def is_most_probable(logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """1 where the target is the most probable class, else 0 (Elbayad et al. 2020, equations 10 and 16)."""
    return (logits.argmax(-1) == targets).to(logits.dtype)


ORACLES: dict[str, ExitOracle] = {"likelihood": target_log_probability, "correctness": is_most_probable}


@torch.no_grad()
def layer_scores(
    oracle: ExitOracle, streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead, targets: Int[Tensor, "b l"]
) -> Float[Tensor, "n b l"]:
    """The scores of all layers (n, b, l); the last channel of each stream is the number of its layer."""
    return torch.stack(
        [oracle(exit_logits(head, stream, layer).float(), targets) for layer, stream in enumerate(streams, 1)]
    )


@torch.no_grad()
def best_layers(
    scores: Float[Tensor, "n b l"],
    positions: TokenPositions,
    scored: Bool[Tensor, "b l"],
    *,
    smoothing: float,
    layer_penalty: float,
) -> Int[Tensor, "b l"]:
    """The layer, counted from 1, with the best score minus `layer_penalty` times its number; the lowest of equal ones.

    Scores are first smoothed over the tokens of a document by exp(-|t - t'|^2 / `smoothing`): 0 means no smoothing,
    infinity a sum over the document (Elbayad et al. 2020, equations 14 to 17; in (16) the counts are those of t', not
    of t). Tokens outside `scored` do not contribute.
    """
    weights = smoothing_kernel(positions, scores, smoothing)
    smoothed = torch.einsum("nbs,bls->nbl", scores.masked_fill(~scored, 0.0), weights)
    layers = torch.arange(1, len(scores) + 1, device=scores.device)
    return (smoothed - layer_penalty * layers[:, None, None]).argmax(0) + 1


def smoothing_kernel(
    positions: TokenPositions, like: Float[Tensor, "n b l"], smoothing: float
) -> Float[Tensor, "b l s"]:
    """The weight of the score of each token s in the smoothed score of each token l of the same document."""
    rows = like.shape[1]
    position_ids = positions.position_ids.expand(rows, -1)
    segment_ids = positions.segment_ids.expand(rows, -1)
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    if math.isinf(smoothing):
        return same_document.to(like.dtype)
    squared_distance = (position_ids[:, :, None] - position_ids[:, None, :]).to(like.dtype) ** 2
    if smoothing:
        weights = torch.exp(-squared_distance / smoothing)
    else:
        weights = (squared_distance == 0).to(like.dtype)
    return torch.where(same_document, weights, 0.0)


@torch.no_grad()
def agreement(streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead) -> Float[Tensor, "b l n"]:
    """For each layer but the last, 1 where it predicts the class of the last layer (Schuster et al. 2022, eq. 9)."""
    *predictions, last = (exit_logits(head, stream, layer).argmax(-1) for layer, stream in enumerate(streams, 1))
    return torch.stack([(prediction == last).float() for prediction in predictions], dim=-1)


def mean_where(values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """The mean of the values where `mask` is set; 0 for an empty mask."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
