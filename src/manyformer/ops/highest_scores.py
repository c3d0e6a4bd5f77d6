"""The indices of the highest scores of each row, the same on every device and for every layout of the rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def choose_highest_scores(scores: Float[Tensor, "*b n"], count: int, *, may_read: bool = True) -> Int[Tensor, "*b c"]:
    """The indices of the `count` highest scores of each row, in any order; of equal scores the last ones.

    -1 in place of scores of -inf; all indices if there are at most `count`. With `may_read` a CPU first looks whether
    there are equal scores.
    """
    scores, length = scores.detach(), scores.shape[-1]
    index = torch.arange(length, device=scores.device)
    if count >= length:
        return torch.where(scores == -torch.inf, -1, index)
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.long, device=scores.device)
    values, chosen = scores.topk(count)
    threshold = values[..., -1:]
    # `topk` chooses any of equal scores: where the last one chosen has equals, a second search decides by the index.
    # On other devices, finding out whether it has would synchronize
    is_readable = may_read and scores.device.type == "cpu"
    if not is_readable or torch.compiler.is_compiling() or _has_ties(scores, threshold, count):
        level = (scores >= threshold).int() + (scores > threshold).int()
        chosen = (level * length + index.int()).topk(count, sorted=False).indices
        values = scores.gather(-1, chosen)
    return torch.where(values == -torch.inf, -1, chosen)


def _has_ties(scores: Float[Tensor, "*b n"], threshold: Float[Tensor, "*b 1"], count: int) -> bool:
    """Whether a row has other scores equal to the last one chosen; which of -inf are chosen does not matter."""
    is_unique = ((scores >= threshold).sum(-1, keepdim=True) == count) | (threshold == -torch.inf)
    return not bool(is_unique.all())
