"""The indices of the highest scores of each row, the same on every device and for every layout of the rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def choose_highest_scores(scores: Float[Tensor, "*b n"], count: int) -> Int[Tensor, "*b c"]:
    """The indices of the `count` highest scores of each row, in any order; of equal scores the last ones.

    -1 in place of scores of -inf; all indices if there are at most `count`.
    """
    scores, length = scores.detach(), scores.shape[-1]
    index = torch.arange(length, device=scores.device)
    if count >= length:
        return torch.where(scores == -torch.inf, -1, index)
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.long, device=scores.device)
    # `topk` chooses any of equal scores: it finds the threshold, and then the largest of distinct integers
    threshold = scores.topk(count).values[..., -1:]
    level = (scores >= threshold).int() + (scores > threshold).int()
    chosen = (level * length + index.int()).topk(count, sorted=False).indices
    return torch.where(scores.gather(-1, chosen) == -torch.inf, -1, chosen)
