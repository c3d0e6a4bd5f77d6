"""Products of reflections I - b w w^T of consecutive tokens between keys and queries, a chunk of tokens at a time."""

import torch
from jaxtyping import Float
from torch import Tensor


def householder_chunk(
    q: Float[Tensor, "b g n c e"],
    k: Float[Tensor, "b g c e"],
    w: Float[Tensor, "b g c e"],
    beta: Float[Tensor, "b g c 1"],
    earlier: Float[Tensor, "b g s e"],
) -> tuple[Float[Tensor, "b g n c t"], Float[Tensor, "b g t e"]]:
    """Scores q_i H_i ... H_(j+1) k_j of a chunk with `earlier` keys and its own, and all these keys after the chunk.

    `earlier` are keys as the tokens before the chunk have turned them; n queries share the reflections of a key head.
    Scores of later keys of the chunk are 0. With rows w, T = (I + strictly lower(b w w^T))^-1 b turns a product of
    reflections into I - w^T T w (Yang et al. 2025, arXiv:2505.16381, section 3.3)."""
    identity = torch.eye(w.shape[2], dtype=w.dtype, device=w.device)
    triangle = identity + (beta * (w @ w.mT)).tril(-1)
    factor = torch.linalg.solve_triangular(triangle, beta * identity, upper=False, unitriangular=True)
    own_keys = (w @ k.mT).tril(-1)
    turned_w = factor.mT @ w
    along = (q @ w.mT[:, :, None]).tril() @ factor[:, :, None]
    own_scores = (q @ k.mT[:, :, None]).tril() - along @ own_keys[:, :, None]
    earlier_scores = (q - along @ w[:, :, None]) @ earlier.mT[:, :, None]
    turned_earlier = earlier - (earlier @ w.mT) @ turned_w
    return (
        torch.cat([earlier_scores, own_scores], -1),
        torch.cat([turned_earlier, k - own_keys.mT @ turned_w], 2),
    )
