"""A mixture of logistic distributions over ordered levels, such as those of brightness."""

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.autocast import autocast_disabled
from manyformer.batches import IGNORE_INDEX
from manyformer.models.model import BatchLoss, count_targets
from manyformer.models.output_head import OutputHead
from manyformer.ops.logistic_bins import log_level, log_levels

NARROWEST = -7.0
"""The least logarithm of a scale, as in the released code of PixelCNN++."""

RARE = -15.0
"""The logit of a class that is no level; levels have their log-probability, so that all such classes are rare."""


@final
class LogisticMixture(OutputHead):
    """`mixtures` logistic distributions for each token, cut into one bin a level (Salimans et al. 2017, PixelCNN++).

    Section 2.1. Classes from `first` on are levels, the lowest first; those before it are special tokens, which no
    target ever is: each is given exp(-15), so that every logit is a number. A token is one value of one channel, and
    a colour's channels depend on each other as all values do, through the stream; the paper's means that depend
    linearly on earlier channels are for models that predict a whole pixel at once. Means start evenly between -1 and 1.
    """

    score_chunk: ClassVar[int] = 512

    def __init__(self, dim: int, classes: int, mixtures: int, *, first: int) -> None:
        super().__init__()
        self.classes, self.first, self.levels = classes, first, classes - first
        if self.levels < 2 or mixtures < 1:
            raise ValueError(
                f"LogisticMixture: {classes} classes from {first} on are {self.levels} levels, and there must be at "
                f"least 2, and mixtures ({mixtures}) at least 1"
            )
        self.project = nn.Linear(dim, 3 * mixtures)
        nn.init.xavier_uniform_(self.project.weight)
        weight, mean, log_scale = self.project.bias.data.view(3, mixtures)
        weight.zero_()
        mean.copy_((2 * torch.arange(mixtures) + 1) / mixtures - 1)
        log_scale.fill_(-math.log(mixtures))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        weight, mean, log_scale = self._parts(x)
        found = torch.logsumexp(weight[..., None] + log_levels(mean, log_scale, self.levels), dim=-2)
        return F.pad(found, (self.first, 0), value=RARE)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, smoothing: float) -> BatchLoss:
        count = count_targets(targets)
        if smoothing:
            # the mean over all levels needs all of them
            logits, wanted = self(x).flatten(0, -2), targets.flatten()
            total = F.cross_entropy(
                logits, wanted, ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        weight, mean, log_scale = self._parts(x)
        level = targets - self.first
        found = torch.logsumexp(weight + log_level(mean, log_scale, level.clamp(min=0), self.levels), dim=-1)
        logit = torch.where(level < 0, RARE, found)
        # levels and special classes together are a little more than 1
        nll = math.log1p(self.first * math.exp(RARE)) - logit
        return BatchLoss(nll.masked_fill(targets == IGNORE_INDEX, 0.0).sum(), count)

    def _parts(self, x: Float[Tensor, "*b d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The log-weight, mean and log-scale of each distribution (*b, k)."""
        # a narrow distribution magnifies every rounding of its mean
        with autocast_disabled(x.device):
            raw = self.project(x if x.dtype == torch.float64 else x.float())
        weight, mean, log_scale = raw.unflatten(-1, (3, -1)).unbind(-2)
        return weight.log_softmax(-1), mean, log_scale.clamp(min=NARROWEST)
