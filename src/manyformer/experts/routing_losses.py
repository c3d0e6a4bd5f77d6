"""Losses that spread tokens over experts, for training alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.device_reads import count_values, reads_are_free
from manyformer.experts.routers import Routing
from manyformer.system.devices import wide_dtype


class RoutingLoss(ABC):
    """A function of the routing of the tokens of one call."""

    @abstractmethod
    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        """The loss of tokens, given the number of the document that each stands in; there is at least one token."""


@final
@dataclass(frozen=True)
class LoadBalanceLoss(RoutingLoss):
    """`weight` E sum_i f_i P_i: f_i is the share of assignments to expert i, P_i its mean probability.

    Fedus et al. 2021 (arXiv:2101.03961, equations 4 to 6), where a balanced load gives `weight`. With `scale="tokens"`
    f_i is the number of assignments over that of tokens, so that it gives `weight` times the experts per token; the
    models of Mixtral's family have that scale. The gradient flows through P_i alone. It is of the tokens of one call
    and one layer: small batches should be balanced no more than large ones, so a weight for them is smaller."""

    weight: float = 0.01
    scale: Literal["assignments", "tokens"] = "assignments"

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        tokens, num_experts = routing.probabilities.shape
        if self.scale == "assignments":
            total = tokens * routing.experts.shape[1]
        else:
            total = tokens
        load = routing.load().to(routing.probabilities.dtype) / total
        return self.weight * num_experts * (load * routing.probabilities.mean(0)).sum()


@final
@dataclass(frozen=True)
class SequenceBalanceLoss(RoutingLoss):
    """The mean over documents of `weight` sum_i f_i P_i, with f_i and P_i of the document's tokens (DeepSeek-V3).

    arXiv:2412.19437, equations 17 to 20: f_i is the share of assignments to expert i times the number of experts, so
    that a balanced load gives `weight`."""

    weight: float = 1e-4

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        probabilities = routing.probabilities
        per_token = routing.experts.shape[1]
        num_experts = probabilities.shape[1]
        last = documents.max()
        # where reading their number takes long, as many as there could be, of which the others are empty
        if reads_are_free(documents):
            num_documents = int(last) + 1
        else:
            num_documents = len(documents)
        lengths = count_values(documents, num_documents).clamp(min=1)[:, None].to(probabilities.dtype)
        cells = documents[:, None] * num_experts + routing.experts.clamp(min=0)
        is_assigned = (routing.experts >= 0).to(wide_dtype(cells.device))
        load = torch.zeros(num_documents * num_experts, dtype=is_assigned.dtype, device=cells.device)
        load = load.scatter_add_(0, cells.flatten(), is_assigned.flatten())
        shares = load.view(num_documents, num_experts).to(probabilities.dtype) * num_experts / (per_token * lengths)
        sums = probabilities.new_zeros(num_documents, num_experts).index_add(0, documents, probabilities)
        return self.weight * (shares * sums / lengths).sum() / (last + 1)


@final
@dataclass(frozen=True)
class RouterZLoss(RoutingLoss):
    """`weight` times the mean of logsumexp(logits)^2, which keeps logits small (Zoph et al. 2022, equation 5)."""

    weight: float = 1e-3

    def __call__(self, routing: Routing, documents: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        return self.weight * routing.logits.logsumexp(-1).square().mean()
