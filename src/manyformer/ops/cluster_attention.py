"""Attention within groups of tokens that belong together, such as the clusters that keys fall into.

Queries are the keys of the same tokens. A token's own key, which is the most like its query, counts only where it sees
no other.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.ops import softmax_attention as ops


def ranks(group: Int[Tensor, "*b s"], last: int) -> Int[Tensor, "*b l"]:
    """How many earlier tokens there are of the group of each of the `last` ones."""
    column = torch.arange(group.shape[-1], device=group.device)
    queries = column[group.shape[-1] - last :, None]
    return ((group[..., group.shape[-1] - last :, None] == group[..., None, :]) & (column < queries)).sum(-1)


def visible_members(
    group: Int[Tensor, "b h s"], rank: Int[Tensor, "b h s"], size: int, last: int
) -> Bool[Tensor, "b h l s"]:
    """Which keys the `last` tokens see, each group being cut into chunks of `size`.

    A token sees those before it in its chunk and in the one before that, its own where there are none.
    """
    begin = group.shape[-1] - last
    mine, chunk = group[..., begin:, None], rank // size
    back = chunk[..., begin:, None] - chunk[..., None, :]
    earlier = (mine == group[..., None, :]) & (rank[..., None, :] < rank[..., begin:, None]) & (back <= 1)
    return fall_back_to_self(earlier, torch.eye(group.shape[-1], dtype=torch.bool, device=group.device)[begin:])


def fall_back_to_self(others: Bool[Tensor, "*b l s"], itself: Bool[Tensor, "*#b l s"]) -> Bool[Tensor, "*b l s"]:
    """The keys that each query sees: `others`, and itself where these are none."""
    return others | (itself & ~others.any(-1, keepdim=True))


def balanced_attention(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> Float[Tensor, "b h s f"]:
    """Attention of each group's members to those before them, averaged over the groups that a token is in.

    Each list of tokens is in order; the number `s` stands for no token and comes last. Who is in no group gets zeros.
    """
    size, length = members.shape[3], k.shape[2]
    row = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1, 1)
    # what stands for no token is some token, which nobody listed sees, and whose output goes one place too far
    index = (row * length + members.clamp(max=length - 1)).flatten()
    keys, values = (
        x.reshape(-1, x.shape[-1]).index_select(0, index).view(len(x), -1, size, x.shape[-1]) for x in (k, v)
    )
    y = values[:, :, :1]
    if size > 1:
        # queries from the second on and keys from the first on: causal attention that leaves out the own key
        others = ops.fused(keys[:, :, 1:], keys[:, :, :-1], values[:, :, :-1], None, causal=True, scale=scale)
        y = torch.cat([y, others], dim=2)
    place = (row * (length + 1) + members).flatten()
    total = y.new_zeros(row.numel() * (length + 1), v.shape[-1]).index_add(0, place, y.reshape(-1, v.shape[-1]))
    count = torch.bincount(place, minlength=len(total)).clamp(min=1).to(total.dtype)
    return (total / count[:, None]).view(*k.shape[:2], length + 1, v.shape[-1])[:, :, :length]


def balanced_attention_reference(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> tuple[Float[Tensor, "b h s f"], Float[Tensor, "b h s s"]]:
    """The definition, as weights of all pairs: the mean over groups of a softmax in each."""
    column = torch.arange(k.shape[2], device=k.device)
    inside = (members[..., None] == column).any(3)
    earlier = inside[..., :, None] & inside[..., None, :] & (column < column[:, None])
    seen = fall_back_to_self(earlier, inside[..., None] & (column == column[:, None]))
    scores = (k @ k.mT * scale)[:, :, None].expand(seen.shape).flatten(1, 2)
    each = ops.weights_of(scores, seen.flatten(1, 2)).view(seen.shape).sum(2)
    weights = (each / inside.sum(2)[..., None].clamp(min=1)).to(v.dtype)
    return weights @ v, weights


def top_members(
    likeness: Float[Tensor, "b h s k"], size: int, share: Int[Tensor, " b"] | None = None
) -> Int[Tensor, "b h k w"]:
    """The `size` tokens most like each of k things, in order; only the best `share` of them in each row.

    A token whose likeness is -inf is none. The number `s` stands for no token.
    """
    length = likeness.shape[2]
    found = likeness.transpose(2, 3).topk(min(size, length), dim=-1)
    index = found.indices.masked_fill(found.values == -torch.inf, length)
    if share is not None:
        late = torch.arange(index.shape[-1], device=index.device) >= share[:, None, None, None]
        index = index.masked_fill(late, length)
    return index.sort(dim=-1).values
