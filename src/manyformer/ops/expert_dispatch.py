"""Tokens sent to some of many experts, and the weighted sum of what these return."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.exact_shares import ceil_shares, exact_share
from manyformer.torch_internals import compiler_disabled

NO_EXPERT = -1
"""The expert of an assignment that is not carried out."""

RunExperts = Callable[[Tensor, Sequence[int]], Tensor]
"""Experts for tokens (n, d) sorted by expert, of which each expert has so many; the result is (n, d)."""

RunGroups = Callable[[Tensor, Tensor | None], Tensor]
"""Experts for groups of tokens (g, m, d), one expert (g) each, or all in their order; the result is (g, m, d)."""

COPIED_WEIGHT = 3
"""A weight that is copied for its product is read, written and read again."""


def dispatch_reference(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: RunExperts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """The definition: all experts process all tokens, and weights of 0 remove what was not chosen."""
    dense_weights = weights.new_zeros(len(x), num_experts + 1).scatter_add(1, experts + 1, weights)[:, 1:]
    counts = [[len(x) if number == expert else 0 for number in range(num_experts)] for expert in range(num_experts)]
    outputs = torch.stack([run_experts(x, count) for count in counts])
    return torch.einsum("end,ne->nd", outputs, dense_weights.to(outputs.dtype))


# numbers of tokens for each expert are data, which graphs of a compiler cannot hold
@compiler_disabled
def dispatch(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_experts: RunExperts,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """The same for chosen pairs alone: assignments sorted by expert, so that each expert is one matrix product.

    Nothing is dropped, and no buffer has an axis of experts (Gale et al. 2022, MegaBlocks, arXiv:2211.15841, has
    kernels of it for a GPU)."""
    assigned = experts.flatten()
    not_run, *counts = torch.bincount(assigned + 1, minlength=num_experts + 1).tolist()
    order = assigned.argsort(stable=True)[not_run:]
    tokens = order // experts.shape[1]
    y = run_experts(x.index_select(0, tokens), counts)
    weighted = y * weights.flatten()[order][:, None].to(y.dtype)
    return y.new_zeros(len(x), y.shape[1]).index_add(0, tokens, weighted)


def dispatch_fixed(
    x: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    run_groups: RunGroups,
    num_experts: int,
) -> Float[Tensor, "n d"]:
    """The same by operators whose shapes do not depend on the choice, for few tokens: nothing is read by the host.

    Each chosen expert is copied, or all process all tokens, whichever moves fewer weights."""
    is_run = experts != NO_EXPERT
    weights, (tokens, per_token) = weights * is_run, experts.shape
    if COPIED_WEIGHT * tokens * per_token < num_experts:
        inputs = x.repeat_interleave(per_token, 0)[:, None]
        outputs = run_groups(inputs, experts.clamp(min=0).flatten())
        y = outputs.view(tokens, per_token, -1)
        return (y * weights[..., None].to(y.dtype)).sum(1)
    dense_weights = weights.new_zeros(tokens, num_experts + 1).scatter_add(1, experts + 1, weights)[:, 1:]
    outputs = run_groups(x.expand(num_experts, -1, -1), None)
    return torch.einsum("end,ne->nd", outputs, dense_weights.to(outputs.dtype))


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
    capacity = ceil_shares(exact_share(factor) * per_token / num_experts, torch.bincount(documents))
    overflows = ranks >= capacity[owners]
    return experts.masked_fill(overflows.view_as(experts), NO_EXPERT)
