"""Tokens sent to some of many experts, the products of all experts, and the weighted sum of what these return.

Numbers of tokens per expert are data. A CPU reads them and makes one product for each expert. Elsewhere they stay on
the device: in a grouped product of torch, or where it has none for the dtype in blocks of tokens of one expert each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.runtime.device_reads import count_values
from manyformer.nn.runtime.devices import device_kind
from manyformer.nn.runtime.exact_shares import ceil_shares, exact_share
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, hides_values
from manyformer.nn.runtime.torch_internals import autocast_dtype, compiler_disabled

GROUPED_CAPABILITY = 9
"""The generation of cards from which on torch has a kernel for grouped products."""

GROUPED_ALIGNMENT = 8
"""Rows of 16-bit numbers that a grouped product takes have a multiple of this length."""

NO_EXPERT = -1
"""The expert of an assignment that is not carried out."""


class ExpertGroups(ABC):
    """How rows, which are sorted by expert, are divided among the experts."""

    @abstractmethod
    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        """Each row projected by the weight of its expert, and its bias added."""


@final
class CountedGroups(ExpertGroups):
    """Groups of numbers of rows that the host knows."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        """One product for each expert that has any rows.

        Weights are split at once, because the gradient of single ones would be as large as all of them each."""
        weights = weight.unbind()
        biases = [None] * len(weights) if bias is None else bias.unbind()
        parts = zip(torch.split(x, self.counts), weights, biases, self.counts, strict=True)
        outputs = [F.linear(rows, weight, bias) for rows, weight, bias, count in parts if count]
        # no row at all: a product without rows, so that the result depends on the weights like any other
        if outputs:
            return torch.cat(outputs)
        return F.linear(x, weights[0], biases[0])


@final
class GroupedRows(ExpertGroups):
    """Groups that end at rows which only the device knows, for the grouped product of torch; every row is in a group.

    `experts` are the experts of the rows."""

    def __init__(self, experts: Int[Tensor, " n"], num_experts: int) -> None:
        self.experts = experts
        self.ends = count_values(experts, num_experts).cumsum(0).int()

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        x, weight, bias = _cast_by_autocast(x, weight, bias)
        y = F.grouped_mm(x, weight.mT, offs=self.ends)
        if bias is None:
            return y
        return y + bias.index_select(0, self.experts)

    @staticmethod
    def can_project(x: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether torch has a kernel for such rows and weights that reads nothing; its other ways loop on the host."""
        dtype = autocast_dtype(x.device) or x.dtype
        if dtype != torch.bfloat16 or device_kind(x.device).capability(x.device) < GROUPED_CAPABILITY:
            return False
        return all(side % GROUPED_ALIGNMENT == 0 for weight in weights for side in weight.shape[1:])


@final
class ExpertBlocks(ExpertGroups):
    """Blocks of equally many rows, each of one of the `experts`; the rows of a block without tokens enough are unused.

    Each block has its own copy of a weight while its product is computed."""

    def __init__(self, experts: Int[Tensor, " m"]) -> None:
        self.experts = experts

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        x, weight, bias = _cast_by_autocast(x, weight, bias)
        blocks = x.view(len(self.experts), -1, x.shape[1])
        y: Tensor = _BlockProduct.call(blocks, weight, self.experts)
        if bias is not None:
            y = y + bias.index_select(0, self.experts)[:, None]
        return y.flatten(0, 1)


class _BlockProduct(HandwrittenGradient):
    """x W^T of each block; the copies of weights are made again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, experts: Tensor) -> Float[Tensor, "m r o"]:
        ctx.save_for_backward(x, weight, experts)
        return x @ weight.index_select(0, experts).mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, experts = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.index_select(0, experts)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # several blocks may be of one expert
            grad_weight = torch.zeros_like(weight).index_add_(0, experts, grad.mT @ x)
        return grad_x, grad_weight, None


def _cast_by_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The dtypes that `F.linear` would compute with: these products are not on the list of autocast."""
    dtype = autocast_dtype(x.device)
    if dtype is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@runtime_checkable
class Experts(Protocol):
    """Experts for rows (n, d) sorted by expert, which `groups` divides among them."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """All matrices (experts, outputs, inputs)."""

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor: ...


def dispatch_reference(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """The definition: all experts process all tokens, and weights of 0 remove what was not chosen."""
    # column 0 takes the weights of NO_EXPERT, which is -1
    dense_weights = weights.new_zeros(len(x), num_experts + 1).scatter_add(1, experts + 1, weights)[:, 1:]
    counts = [[len(x) if number == expert else 0 for number in range(num_experts)] for expert in range(num_experts)]
    outputs = torch.stack([run_experts(x, CountedGroups(count)) for count in counts])
    return torch.einsum("end,ne->nd", outputs, dense_weights.to(outputs.dtype))


def dispatch_to_all(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """Every expert processes every token, in operations whose shapes do not depend on what was chosen."""
    rows = x.expand(num_experts, *x.shape).flatten(0, 1)
    y = run_experts(rows, ExpertBlocks(torch.arange(num_experts, device=x.device))).view(num_experts, x.shape[0], -1)
    # column 0 takes the weights of NO_EXPERT, which is -1
    dense_weights = weights.new_zeros(x.shape[0], num_experts + 1).scatter_add(1, experts + 1, weights)[:, 1:]
    return torch.einsum("end,ne->nd", y, dense_weights.to(y.dtype))


def dispatch(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
    *,
    host_reads: bool,
) -> Float[Tensor, "n d"]:
    """The same for chosen pairs alone: assignments sorted by expert.

    Nothing is dropped, and no buffer has an axis of experts (Gale et al. 2022, MegaBlocks, arXiv:2211.15841, has
    kernels of it for a GPU). Without `host_reads` the host does not learn how many tokens an expert has. In exported
    graphs and under transformations all experts see all tokens."""
    if hides_values():
        return dispatch_to_all(x, experts, weights, run_experts, num_experts)
    if host_reads or not experts.numel():
        return dispatch_by_counts(x, experts, weights, run_experts, num_experts)
    if GroupedRows.can_project(x, run_experts.weights):
        return dispatch_in_groups(x, experts, weights, run_experts, num_experts)
    return dispatch_in_blocks(x, experts, weights, run_experts, num_experts)


# numbers of tokens for each expert are data, which graphs of a compiler cannot hold
@compiler_disabled
def dispatch_by_counts(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """One matrix product for each expert, with numbers of tokens that the host reads."""
    assigned = experts.flatten()
    # NO_EXPERT is -1 and is counted and sorted first
    not_run, *counts = torch.bincount(assigned + 1, minlength=num_experts + 1).tolist()
    order = assigned.argsort(stable=True)[not_run:]
    tokens = order // experts.shape[1]
    y = run_experts(x.index_select(0, tokens), CountedGroups(counts))
    weighted = y * weights.flatten()[order][:, None].to(y.dtype)
    return y.new_zeros(len(x), y.shape[1]).index_add(0, tokens, weighted)


def dispatch_in_groups(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """One grouped product; assignments that are not carried out go to the last expert, and their results nowhere."""
    assigned = experts.flatten()
    sorted_experts, order = assigned.where(assigned >= 0, num_experts - 1).sort(stable=True)
    y = run_experts(x.index_select(0, order // experts.shape[1]), GroupedRows(sorted_experts, num_experts))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return _weighted_sum(y, places, experts, weights)


def dispatch_in_blocks(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: Experts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """Blocks of the mean number of tokens of an expert: at most two for each expert, whatever the experts are.

    With no more assignments than experts, as in decoding, each is a block."""
    assigned = experts.flatten()
    pairs = len(assigned)
    # of mean size: an expert with n tokens has at most n / size + 1 blocks, which bounds their sum without reading
    # counts
    size = -(-len(assigned) // num_experts)
    blocks = min(pairs, (pairs + num_experts * (size - 1)) // size)
    # what is not carried out is sorted last, and has no slot
    keys = assigned.where(assigned >= 0, num_experts)
    sorted_keys, order = keys.sort(stable=True)
    counts = count_values(keys, num_experts + 1)
    block_ends = ((counts[:-1] + size - 1) // size).cumsum(0)
    block_experts = torch.searchsorted(block_ends, torch.arange(blocks, device=x.device), right=True)
    # the place of each assignment among those of its expert
    rank = torch.arange(pairs, device=x.device) - (counts.cumsum(0) - counts)[sorted_keys]
    first_slots = F.pad(block_ends * size, (1, 0))[sorted_keys]
    slots = torch.where(sorted_keys < num_experts, first_slots + rank, blocks * size)
    # unused slots hold the first token, whose result no one reads
    slot_tokens = torch.zeros(blocks * size + 1, dtype=torch.long, device=x.device)
    slot_tokens = slot_tokens.scatter_(0, slots, order // experts.shape[1])[:-1]
    groups = ExpertBlocks(block_experts.clamp(max=num_experts - 1))
    y = run_experts(x.index_select(0, slot_tokens), groups)
    places = torch.empty_like(order).scatter_(0, order, slots.clamp(max=blocks * size - 1))
    return _weighted_sum(y, places, experts, weights)


def _weighted_sum(
    y: Float[Tensor, "m d"], places: Int[Tensor, " p"], experts: Int[Tensor, "n k"], weights: Float[Tensor, "n k"]
) -> Float[Tensor, "n d"]:
    """The sum of each token's results, which are at these places for all choices of a token one after another."""
    results = y.index_select(0, places).view(*experts.shape, -1)
    # not by index_add, which sums in any order on a GPU
    weighted = results * weights[..., None].to(y.dtype)
    return torch.where((experts != NO_EXPERT)[..., None], weighted, 0.0).sum(1)


def drop_overflow(
    experts: Int[Tensor, "n k"], documents: Int[Tensor, " n"], num_experts: int, factor: float
) -> Int[Tensor, "n k"]:
    """`experts` with `NO_EXPERT` for assignments beyond each expert's capacity for a document.

    The capacity is `factor` times the expert's share of T tokens with k experts each, T k / E, rounded up (Fedus et al.
    2021, section 2.2), exactly: 15 of 50 tokens at a factor of 1.2 with 4 experts. Earlier tokens come first, whatever
    their choice, so that no later token displaces one."""
    per_token = experts.shape[1]
    owners = documents[:, None].expand_as(experts).flatten()
    groups = owners * (num_experts + 1) + experts.flatten() + 1
    order = groups.argsort(stable=True)
    sorted_groups = groups[order]
    # the first assignment of the same expert and document
    first = torch.searchsorted(sorted_groups, sorted_groups)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device) - first)
    capacity = ceil_shares(exact_share(factor) * per_token / num_experts, count_values(documents, documents.shape[0]))
    overflows = ranks >= capacity[owners]
    return experts.masked_fill(overflows.view_as(experts), NO_EXPERT)
