"""Tokens sent to some of many experts, and the weighted sum of what these return."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.device_reads import count_values
from manyformer.exact_shares import ceil_shares, exact_share
from manyformer.ops.expert_groups import CountedGroups, ExpertBlocks, ExpertGroups, GroupedRows
from manyformer.torch_internals import compiler_disabled

NO_EXPERT = -1
"""The expert of an assignment that is not carried out."""


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
    dense_weights = weights.new_zeros(len(x), num_experts + 1).scatter_add(1, experts + 1, weights)[:, 1:]
    counts = [[len(x) if number == expert else 0 for number in range(num_experts)] for expert in range(num_experts)]
    outputs = torch.stack([run_experts(x, CountedGroups(count)) for count in counts])
    return torch.einsum("end,ne->nd", outputs, dense_weights.to(outputs.dtype))


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
    kernels of it for a GPU). Without `host_reads` the host does not learn how many tokens an expert has."""
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
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
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
    size = -(-len(assigned) // num_experts)
    blocks = min(pairs, (pairs + num_experts * (size - 1)) // size)
    # what is not carried out is sorted last, and has no slot
    keys = assigned.where(assigned >= 0, num_experts)
    sorted_keys, order = keys.sort(stable=True)
    counts = count_values(keys, num_experts + 1)
    block_ends = ((counts[:-1] + size - 1) // size).cumsum(0)
    block_experts = torch.searchsorted(block_ends, torch.arange(blocks, device=x.device), right=True)
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
    first = torch.searchsorted(sorted_groups, sorted_groups)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) - first)
    capacity = ceil_shares(exact_share(factor) * per_token / num_experts, count_values(documents, len(documents)))
    overflows = ranks >= capacity[owners]
    return experts.masked_fill(overflows.view_as(experts), NO_EXPERT)
