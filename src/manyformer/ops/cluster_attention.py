"""Attention within groups of tokens, such as clusters of keys.

Queries are the keys of the same tokens. A token's own key, which is the most similar to its query, is visible only
where no other one is.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.device_reads import count_values
from manyformer.ops import softmax_attention as ops


def ranks(group: Int[Tensor, "*b s"], last: int) -> Int[Tensor, "*b l"]:
    """Rank of each of the `last` tokens within its group: the number of earlier tokens of that group."""
    column = torch.arange(group.shape[-1], device=group.device)
    queries = column[group.shape[-1] - last :, None]
    return ((group[..., group.shape[-1] - last :, None] == group[..., None, :]) & (column < queries)).sum(-1)


def visible_members(
    group: Int[Tensor, "b h s"], rank: Int[Tensor, "b h s"], size: int, last: int
) -> Bool[Tensor, "b h l s"]:
    """Mask of the keys visible to the `last` tokens, with each group split into chunks of `size`.

    A token sees earlier tokens of its chunk and of the previous one, or its own key where there are none.
    """
    start = group.shape[-1] - last
    same_group = group[..., start:, None] == group[..., None, :]
    chunk = rank // size
    chunk_distance = chunk[..., start:, None] - chunk[..., None, :]
    earlier = same_group & (rank[..., None, :] < rank[..., start:, None]) & (chunk_distance <= 1)
    return fall_back_to_self(earlier, torch.eye(group.shape[-1], dtype=torch.bool, device=group.device)[start:])


def fall_back_to_self(visible: Bool[Tensor, "*b l s"], self_mask: Bool[Tensor, "*#b l s"]) -> Bool[Tensor, "*b l s"]:
    """The mask `visible`, with `self_mask` added in the rows that have no visible key."""
    return visible | (self_mask & ~visible.any(-1, keepdim=True))


def balanced_attention(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> Float[Tensor, "b h s f"]:
    """Attention of each group's members to earlier members, averaged over the groups that a token is in.

    The members of a group are sorted; the index `s` stands for no token and comes last. Tokens in no group get zeros.
    """
    size = members.shape[3]
    length = k.shape[2]
    row = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1, 1)
    # index s reads the last token, which no member sees, and writes to an extra row that is dropped
    index = (row * length + members.clamp(max=length - 1)).flatten()
    keys, values = (
        x.reshape(-1, x.shape[-1]).index_select(0, index).view(len(x), -1, size, x.shape[-1]) for x in (k, v)
    )
    y = values[:, :, :1]
    if size > 1:
        # queries from the second on and keys from the first on: causal attention without the token's own key
        earlier = keys[:, :, :-1], values[:, :, :-1]
        later_y = ops.fused_attention(keys[:, :, 1:], *earlier, None, causal=True, scale=scale)
        y = torch.cat([y, later_y], dim=2)
    target = (row * (length + 1) + members).flatten()
    total = y.new_zeros(row.numel() * (length + 1), v.shape[-1]).index_add(0, target, y.reshape(-1, v.shape[-1]))
    count = count_values(target, len(total)).clamp(min=1).to(total.dtype)
    return (total / count[:, None]).view(*k.shape[:2], length + 1, v.shape[-1])[:, :, :length]


def balanced_attention_reference(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> tuple[Float[Tensor, "b h s f"], Float[Tensor, "b h s s"]]:
    """The definition with the weights of all pairs: the mean over groups of a softmax within each."""
    column = torch.arange(k.shape[2], device=k.device)
    inside = (members[..., None] == column).any(3)
    earlier = inside[..., :, None] & inside[..., None, :] & (column < column[:, None])
    visible = fall_back_to_self(earlier, inside[..., None] & (column == column[:, None]))
    scores = (k @ k.mT * scale)[:, :, None].expand(visible.shape).flatten(1, 2)
    summed = ops.masked_softmax(scores, visible.flatten(1, 2)).view(visible.shape).sum(2)
    weights = (summed / inside.sum(2)[..., None].clamp(min=1)).to(v.dtype)
    return weights @ v, weights


def top_members(
    similarity: Float[Tensor, "b h s k"], size: int, share: Int[Tensor, " b"] | None = None
) -> Int[Tensor, "b h k w"]:
    """The `size` most similar tokens of each of k groups, sorted by index; only the best `share` of them in each row.

    A token with similarity -inf is never a member. The index `s` stands for no token.
    """
    length = similarity.shape[2]
    top = similarity.transpose(2, 3).topk(min(size, length), dim=-1)
    index = top.indices.masked_fill(top.values == -torch.inf, length)
    if share is not None:
        beyond_share = torch.arange(index.shape[-1], device=index.device) >= share[:, None, None, None]
        index = index.masked_fill(beyond_share, length)
    return index.sort(dim=-1).values
