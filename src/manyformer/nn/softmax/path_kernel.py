"""PaTH attention: between a key and a query, every token reflects the key along a direction of its own."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Causal
from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.torch_internals import autocast_disabled

EPSILON = 1e-6
"""Added to the squared length of a direction: one of zeros stays zero."""


class PaTHState(NamedTuple):
    """The tokens so far: keys as all tokens after them have turned them, values, positions and documents."""

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    position_ids: Int[Tensor, "b s"]
    segment_ids: Int[Tensor, "b s"]


class _ReflectionProjection(nn.Module):
    """The direction of each token and key head, of low rank, and the logit of its strength."""

    def __init__(self, dim: int, kv_heads: int, head_dim: int, rank: int) -> None:
        super().__init__()
        self.direction = HeadProjection(dim, kv_heads, head_dim, rank=rank)
        self.strength = HeadProjection(dim, kv_heads, 1, bias=True)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l n"]:
        return torch.cat([self.direction(x), self.strength(x)], -1)


@final
class PaTHKernel(Kernel):
    """Causal softmax of q_i H_i ... H_(j+1) k_j / sqrt(e) with H = I - b w w^T (Yang et al. 2025, PaTH, section 3).

    arXiv:2505.16381: w is a direction of length 1 and b = 2 sigmoid(.) a strength, both projected from the token, so
    that positions depend on all tokens between key and query. Directions have rank `rank`; unlike the paper's they are
    not convolved over three tokens. Rows are computed `chunk` tokens at a time, through the triangular form of the
    products. Each new token turns all keys before it: the state holds turned keys. Raises ValueError for a rank or a
    chunk below 1.
    """

    supports: frozenset[str] = frozenset()
    recurrent = True
    cache_mask = Causal()

    def __init__(self, dim: int, kv_heads: int, head_dim: int, *, rank: int = 32, chunk: int = 64) -> None:
        super().__init__()
        if rank < 1 or chunk < 1:
            raise ValueError(f"PaTHKernel: rank ({rank}) and chunk ({chunk}) must be at least 1")
        self.chunk = chunk
        self.gate_dim = head_dim + 1
        self.reflection = _ReflectionProjection(dim, kv_heads, head_dim, rank)

    @property
    def gate_projection(self) -> nn.Module | None:
        return self.reflection

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return ()

    def forward(self, call: KernelCall) -> LayerOutput:
        if call.q.shape[2] != call.k.shape[2]:
            raise ValueError(
                f"PaTHKernel turns keys token by token, so it needs a key for each query, got {call.k.shape[2]} keys, "
                f"{call.q.shape[2]} queries"
            )
        width = call.q.shape[-1]
        v, direction, strength = torch.split(call.v, [call.v.shape[-1] - width - 1, width, 1], -1)
        compute_dtype = torch.promote_types(call.q.dtype, torch.float32)
        direction = direction.to(compute_dtype)
        w = direction * (direction.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
        beta = 2 * torch.sigmoid(strength.to(compute_dtype))
        # a strength of 0 is no reflection: padding turns no key
        beta = beta.masked_fill((call.key_positions.segment_ids == PADDING_SEGMENT)[:, None, :, None], 0.0)
        with autocast_disabled(call.q.device):
            q, k, v_wide = (x.to(compute_dtype) for x in (call.q, call.k, v))
            y, state, weights = self._attend(q / math.sqrt(width), k, v_wide, w, beta, call)
        if call.watch is not no_watch:
            call.watch(self, "weights", weights)
        return LayerOutput(y.to(call.v.dtype), None if call.state is None else state)

    def explain(self, call: KernelCall) -> str:
        return f"chunked: products of reflections, {self.chunk} tokens at a time"

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}"

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, call: KernelCall
    ) -> tuple[Float[Tensor, "b h l f"], PaTHState, Float[Tensor, "b h l s"]]:
        """Outputs, the state after all tokens, and the weights of all keys so far."""
        positions = [ids.expand(len(q), -1) for ids in call.key_positions[:2]]
        if isinstance(call.state, PaTHState):
            turned = call.state.k.to(k.dtype)
            all_v = torch.cat([call.state.v.to(v.dtype), v], 2)
            positions = [torch.cat(pair, 1) for pair in zip(call.state[2:], positions)]
        else:
            turned = k[:, :, :0]
            all_v = v
        past = turned.shape[2]
        group = q.shape[1] // k.shape[1]
        weights = []
        for start in range(0, q.shape[2], self.chunk):
            tokens = slice(start, start + self.chunk)
            # queries of a group share the reflections of its key head
            queries = q[:, :, tokens].unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
            logits, turned = householder_chunk(queries, k[:, :, tokens], w[:, :, tokens], beta[:, :, tokens], turned)
            stop = past + start + logits.shape[-2]
            position_ids, segment_ids = (ids[:, :stop] for ids in positions)
            key_positions = TokenPositions(position_ids, segment_ids)
            query_positions = key_positions.columns(past + start, stop)
            mask = Causal().dense(query_positions, key_positions, 1)
            chunk_weights = masked_softmax(logits.flatten(1, 2), mask)
            weights.append(nn.functional.pad(chunk_weights, (0, all_v.shape[2] - stop)))
        all_weights = torch.cat(weights, 2)
        y = all_weights @ all_v.repeat_interleave(group, 1)
        state = PaTHState(turned.to(call.k.dtype), all_v.to(call.v.dtype), *positions)
        return y, state, all_weights


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
    # a token reflects only keys before it
    own_keys = (w @ k.mT).tril(-1)
    turned_w = factor.mT @ w
    along = (q @ w.mT[:, :, None]).tril() @ factor[:, :, None]
    own_scores = (q @ k.mT[:, :, None]).tril() - along @ own_keys[:, :, None]
    earlier_scores = (q - along @ w[:, :, None]) @ earlier.mT[:, :, None]
    # the whole product of the chunk's reflections, applied to all keys before it
    turned_earlier = earlier - (earlier @ w.mT) @ turned_w
    return (
        torch.cat([earlier_scores, own_scores], -1),
        torch.cat([turned_earlier, k - own_keys.mT @ turned_w], 2),
    )
