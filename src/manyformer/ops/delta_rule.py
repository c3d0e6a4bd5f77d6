"""The delta rule: a matrix memory that replaces the value it predicts for a key instead of adding to it.

M_i = M_(i-1) + b_i c_i (v_i - M_(i-1)^T c_i)^T,  y_i = M_i^T a_i  (Schlag et al. 2021, section 4.2), so that
M_i = (I - b_i c_i c_i^T) M_(i-1) + b_i c_i v_i^T.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.ops.linear_attention import LinearAttentionResult


def recurrent(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    strength: Float[Tensor, "b h l"],
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
) -> LinearAttentionResult:
    """The definition: a loop over tokens."""
    memory = v.new_zeros(*c.shape[:2], c.shape[-1], v.shape[-1]) if memory is None else memory
    outputs, current = [], 0
    for i in range(a.shape[2]):
        if run is not None:
            same = run[:, i] == (run[:, i - 1] if i else current)
            memory = memory.where(same[:, None, None, None], 0.0)
        key, predicted = c[:, :, i], (c[:, :, i, None, :] @ memory)[:, :, 0]
        update = strength[:, :, i, None] * (v[:, :, i] - predicted)
        memory = memory + key[..., :, None] * update[..., None, :]
        outputs.append((a[:, :, i, None, :] @ memory)[:, :, 0])
    return LinearAttentionResult(torch.stack(outputs, dim=2), memory)


def chunked(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    strength: Float[Tensor, "b h l"],
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    chunk: int = 64,
) -> LinearAttentionResult:
    """A loop over chunks: within each, the updates of all tokens solve one triangular system.

    Yang et al. 2024 (arXiv:2406.06484), section 3.2. The update of token i, w_i = b_i (v_i - M^T c_i - sum over earlier
    j of (c_i . c_j) w_j) with M the memory before the chunk, is linear in w.
    """
    memory = v.new_zeros(*c.shape[:2], c.shape[-1], v.shape[-1]) if memory is None else memory
    outputs, current = [], v.new_zeros(a.shape[0], dtype=torch.long)
    for begin in range(0, a.shape[2], chunk):
        A, C, V = (x[:, :, begin : begin + chunk] for x in (a, c, v))
        b = strength[:, :, begin : begin + chunk, None]
        pairs, query_pairs = (C @ C.mT).tril(-1), (A @ C.mT).tril()
        predicted, retrieved = C @ memory, A @ memory
        if run is not None:
            chunk_run = run[:, None, begin : begin + chunk, None]
            same, entered = chunk_run == chunk_run.mT, chunk_run == current[:, None, None, None]
            pairs, query_pairs = pairs * same, query_pairs * same
            predicted, retrieved = predicted * entered, retrieved * entered
            last = chunk_run[:, :, -1:]
            memory, current = memory * (last == current[:, None, None, None]), last[:, 0, 0, 0]
            C = C * (chunk_run == last)
        system = torch.eye(C.shape[2], dtype=v.dtype, device=v.device) + b * pairs
        updates = torch.linalg.solve_triangular(system, b * (V - predicted), upper=False, unitriangular=True)
        outputs.append(retrieved + query_pairs @ updates)
        memory = memory + C.mT @ updates
    return LinearAttentionResult(torch.cat(outputs, dim=2), memory)
