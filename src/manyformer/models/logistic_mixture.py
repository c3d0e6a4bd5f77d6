"""An output head that predicts ordered levels, such as brightness, by a mixture of logistic distributions."""

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.models.head import BatchLoss, OutputHead, count_targets
from manyformer.ops.logistic_bins import log_level, log_levels
from manyformer.torch_internals import autocast_disabled

MIN_LOG_SCALE = -7.0
"""The minimum log-scale of a distribution, as in the released code of PixelCNN++."""

SPECIAL_TOKEN_LOGIT = -15.0
"""The logit of special tokens; the logits of levels are log-probabilities, so that special tokens are improbable."""


@final
class LogisticMixture(OutputHead):
    """`mixtures` logistic distributions per token, discretized to one bin per level (PixelCNN++).

    Salimans et al. 2017, section 2.1. Classes from `first` on are levels in ascending order; the classes below are
    special tokens, which are never targets: each has probability exp(-15), so that every logit is finite. A token is
    one value of one channel, and the channels of a color depend on each other through the stream, as all values do;
    the paper's means that depend linearly on earlier channels are for models that predict all values of a pixel at
    once. Means are initialized evenly between -1 and 1.
    """

    score_chunk: ClassVar[int] = 512

    def __init__(self, dim: int, classes: int, mixtures: int, *, first: int) -> None:
        super().__init__()
        self.classes = classes
        self.first = first
        self.levels = classes - first
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
        weight, mean, log_scale = self._mixture_parameters(x)
        log_probs = torch.logsumexp(weight[..., None] + log_levels(mean, log_scale, self.levels), dim=-2)
        return F.pad(log_probs, (self.first, 0), value=SPECIAL_TOKEN_LOGIT)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        count = count_targets(targets)
        if label_smoothing:
            # label smoothing needs the log-probabilities of all levels
            logits = self(x).flatten(0, -2)
            target_ids = targets.flatten()
            total = F.cross_entropy(
                logits, target_ids, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        weight, mean, log_scale = self._mixture_parameters(x)
        level = targets - self.first
        log_prob = torch.logsumexp(weight + log_level(mean, log_scale, level.clamp(min=0), self.levels), dim=-1)
        logit = torch.where(level < 0, SPECIAL_TOKEN_LOGIT, log_prob)
        # normalizes: the probabilities of levels and special tokens sum to slightly more than 1
        nll = math.log1p(self.first * math.exp(SPECIAL_TOKEN_LOGIT)) - logit
        return BatchLoss(nll.masked_fill(targets == IGNORE_INDEX, 0.0).sum(), count)

    def _mixture_parameters(self, x: Float[Tensor, "*b d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The log-weight, mean and log-scale of each distribution (*b, k)."""
        # a narrow distribution amplifies the rounding errors of its mean
        with autocast_disabled(x.device):
            raw = self.project(x if x.dtype == torch.float64 else x.float())
        weight, mean, log_scale = raw.unflatten(-1, (3, -1)).unbind(-2)
        return weight.log_softmax(-1), mean, log_scale.clamp(min=MIN_LOG_SCALE)
