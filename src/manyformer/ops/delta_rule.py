"""The delta rule: a memory that corrects what it says for a key instead of adding to it.

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
    """Token by token: the definition."""
    memory = v.new_zeros(*c.shape[:2], c.shape[-1], v.shape[-1]) if memory is None else memory
    outputs, current = [], 0
    for i in range(a.shape[2]):
        if run is not None:
            same = run[:, i] == (run[:, i - 1] if i else current)
            memory = memory.where(same[:, None, None, None], 0.0)
        key, said = c[:, :, i], (c[:, :, i, None, :] @ memory)[:, :, 0]
        new = strength[:, :, i, None] * (v[:, :, i] - said)
        memory = memory + key[..., :, None] * new[..., None, :]
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
    """Chunk after chunk: within one, all corrections at once are one triangular system.

    Yang et al. 2024 (arXiv:2406.06484), section 3.2. What tokens write, w_i = b_i (v_i - M^T c_i - sum over earlier j
    of (c_i . c_j) w_j) with M the memory before the chunk, is linear in w.
    """
    memory = v.new_zeros(*c.shape[:2], c.shape[-1], v.shape[-1]) if memory is None else memory
    outputs, current = [], v.new_zeros(a.shape[0], dtype=torch.long)
    for begin in range(0, a.shape[2], chunk):
        A, C, V = (x[:, :, begin : begin + chunk] for x in (a, c, v))
        b = strength[:, :, begin : begin + chunk, None]
        pairs, reads = (C @ C.mT).tril(-1), (A @ C.mT).tril()
        said, told = C @ memory, A @ memory
        if run is not None:
            here = run[:, None, begin : begin + chunk, None]
            same, entered = here == here.mT, here == current[:, None, None, None]
            pairs, reads, said, told = pairs * same, reads * same, said * entered, told * entered
            last = here[:, :, -1:]
            memory, current = memory * (last == current[:, None, None, None]), last[:, 0, 0, 0]
            C = C * (here == last)
        system = torch.eye(C.shape[2], dtype=v.dtype, device=v.device) + b * pairs
        new = torch.linalg.solve_triangular(system, b * (V - said), upper=False, unitriangular=True)
        outputs.append(told + reads @ new)
        memory = memory + C.mT @ new
    return LinearAttentionResult(torch.cat(outputs, dim=2), memory)
