"""Causal linear attention whose memory forgets each feature channel at its own rate (Yang et al. 2024).

    M_i = diag(exp(decay_i)) M_(i-1) + c_i v_i^T,    y_i = M_i^T a_i    (arXiv:2312.06635, section 4)

Every exponent is a sum of decays, at most 0, so that no factor overflows however strong the decay is.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.costs import COSTS

BLOCK = COSTS.channel_decay_block


def channel_decay_pairs(
    a: Float[Tensor, "*b l r"], c: Float[Tensor, "*b l r"], total: Float[Tensor, "*b l r"]
) -> Float[Tensor, "*b l l"]:
    """The definition: the sums over channels of a_i c_j exp(total_i - total_j) where j <= i; `total` sums decays."""
    hidden = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool, device=a.device).triu(1)
    # the exponent of hidden pairs may overflow
    exponent = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(hidden[..., None], -torch.inf)
    return (a[..., :, None, :] * c[..., None, :, :] * exponent.exp()).sum(-1)


def chunked_channel_decay(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l r"],
    run: Int[Tensor, "b l"] | None,
    memory: Float[Tensor, "b h r f"],
    chunk: int,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h r f"]]:
    """Outputs and final memory; the length is a multiple of `chunk`."""
    queries, keys, values, decays = (_split_length(x, chunk) for x in (a, c, v, decay))
    total = decays.cumsum(-2)
    last = total[..., -1:, :]
    pairs = _chunk_pairs(queries, keys, total)
    enter, leave, keep = total.exp(), (last - total).exp(), last.exp().mT
    if run is not None:
        runs = run.view(run.shape[0], 1, -1, chunk)
        # the memory at the start of a chunk belongs to the last run of the previous chunk
        previous, last_run = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0)), runs[..., -1:]
        pairs = pairs * (runs[..., :, None] == runs[..., None, :])
        enter, leave = enter * (runs == previous)[..., None], leave * (runs == last_run)[..., None]
        keep = keep * (last_run == previous)[..., None]
    additions, memories = (keys * leave).mT @ values, []
    for chunk_index in range(additions.shape[2]):
        memories.append(memory)
        memory = torch.addcmul(additions[:, :, chunk_index], memory, keep[:, :, chunk_index])
    y = pairs @ values + (queries * enter) @ torch.stack(memories, 2)
    return y.flatten(2, 3), memory


def _chunk_pairs(
    a: Float[Tensor, "b h n c r"], c: Float[Tensor, "b h n c r"], total: Float[Tensor, "b h n c r"]
) -> Float[Tensor, "b h n c c"]:
    """`channel_decay_pairs` within each chunk: by channels within a block, by a product of matrices between blocks.

    Between blocks the factor is split at the first token of the query's block, into two that are at most 1."""
    chunk, block = a.shape[-2], min(BLOCK, a.shape[-2])
    padding = -chunk % block
    a, c = (F.pad(x, (0, 0, 0, padding)) for x in (a, c))
    total = torch.cat([total, total[..., -1:, :].expand(*total.shape[:-2], padding, -1)], dim=-2)
    query_blocks, key_blocks, totals = (_split_length(x, block) for x in (a, c, total))
    start = F.pad(totals[..., :-1, -1:, :], (0, 0, 0, 0, 1, 0))
    earlier_keys = c[..., None, :, :] * (start - total[..., None, :, :]).clamp(max=0.0).exp()
    between = (query_blocks * (totals - start).exp()) @ earlier_keys.mT
    number = torch.arange(chunk + padding, device=a.device) // block
    inside = channel_decay_pairs(query_blocks, key_blocks, totals)
    own_block = torch.eye(totals.shape[-3], dtype=torch.bool, device=a.device)[:, None, :, None]
    within = torch.where(own_block, inside[..., None, :], 0.0).flatten(-2).flatten(-3, -2)
    pairs: Tensor = within + between.flatten(-3, -2) * (number[:, None] > number)
    return pairs[..., :chunk, :chunk]


def _split_length(x: Float[Tensor, "*b l e"], size: int) -> Float[Tensor, "*b n s e"]:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])
