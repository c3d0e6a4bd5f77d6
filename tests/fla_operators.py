"""Stand-ins for the operators of fla-core, with their arguments and layouts, by the definition token by token."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyformer.nn.linear import matrix_recurrence

ARGUMENTS = {
    "chunk_simple_gla": {"q", "k", "v", "g"},
    "chunk_gla": {"q", "k", "v", "g"},
    "chunk_delta_rule": {"q", "k", "v", "beta"},
    "chunk_gated_delta_rule": {"q", "k", "v", "g", "beta"},
    "chunk_kda": {"q", "k", "v", "g", "beta"},
}
OPTIONS = {"scale", "initial_state", "output_final_state", "cu_seqlens"}


def load_stand_in(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The stand-in of this name; it refuses other arguments, and shapes that the package refuses."""

    def operator(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        output_final_state: bool,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, length, heads, width = q.shape
        optional = {"chunk_simple_gla": {"g"}}.get(name, set())
        given = {"q", "k", "v", *({"g"} if g is not None else ()), *({"beta"} if beta is not None else ())}
        assert ARGUMENTS[name] - optional <= given <= ARGUMENTS[name]
        assert all(x.is_contiguous() for x in (q, k, v))
        assert k.shape == q.shape
        assert v.shape[:3] == q.shape[:3]
        per_channel = name in ("chunk_gla", "chunk_kda")
        assert g is None or g.shape == (rows, length, heads, *([width] if per_channel else []))
        assert beta is None or beta.shape == (rows, length, heads)
        assert output_final_state
        assert initial_state is None or initial_state.dtype == torch.float32
        starts = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        assert cu_seqlens is None or rows == 1
        outputs, finals = [], []
        for index, (begin, end) in enumerate(itertools.pairwise(starts)):

            def part(x: Tensor | None, begin: int = begin, end: int = end) -> Any:
                return None if x is None else x[:, begin:end].float().transpose(1, 2)

            memory = initial_state
            if cu_seqlens is not None and initial_state is not None:
                memory = initial_state[index : index + 1]
            decay = part(g)
            y, final = matrix_recurrence.recurrent(
                part(q) * scale,
                part(k),
                part(v),
                decay if decay is None or per_channel else decay[..., None],
                None,
                memory,
                strength=part(beta),
            )
            outputs.append(y.transpose(1, 2))
            finals.append(final)
        return torch.cat(outputs, 1).to(q.dtype), torch.cat(finals)

    return operator
