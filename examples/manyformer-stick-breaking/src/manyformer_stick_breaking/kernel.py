"""Stick-breaking attention: each query breaks its weights off a stick, from the nearest earlier key to the farthest."""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.nn import Kernel
from manyformer.nn.core import LayerOutput, TokenPositions
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import Mask
from manyformer.nn.runtime.torch_internals import autocast_disabled


@final
@dataclass(frozen=True)
class EarlierTokens(Mask):
    """Keys before the query's position; a token does not attend to itself."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Tensor:
        return k.position_ids < q.position_ids

    @property
    def causal(self) -> bool:
        return True


@final
class StickBreakingKernel(Kernel):
    """Stick-breaking attention over all earlier tokens (Tan et al. 2024, arXiv:2410.17980).

    The weight of key j for query i is sigmoid(z_ij) times the product of 1 - sigmoid(z_ik) over the keys k between
    them, with z the scaled dot products. All pairs are formed, in float32 at least: the authors' kernel fuses what is
    four tensors of shape (b, h, l, s) here. Keys must be in the order of their positions, as in all full caches.
    """

    supports = frozenset({"query", "key"})

    def __init__(self) -> None:
        super().__init__()
        self.mask = self.cache_mask = EarlierTokens()

    def forward(self, call: KernelCall) -> LayerOutput:
        k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], dim=1) for x in (call.k, call.v))
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        visible = self.mask.dense(call.query_positions, call.key_positions, call.q.shape[1])
        with autocast_disabled(call.q.device):
            scores = call.q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(k.shape[-1])
            weights = stick_breaking_weights(scores, visible).to(v.dtype)
        call.watch(self, "weights", weights)
        return LayerOutput(weights @ v, call.state)

    def explain(self, call: KernelCall) -> str:
        return "pairs: stick-breaking attention has no other path here"

    def extra_repr(self) -> str:
        return repr(self.mask)


def stick_breaking_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Weights (b, h, l, s) from scores (b, h, l, s); invisible keys take nothing and leave the stick as it is.

    In log space: log w_j = z_j - sum of softplus(z_k) over the keys from j to the query.
    """
    remaining = F.softplus(scores).masked_fill(~visible, 0.0)
    taken = remaining.flip(-1).cumsum(-1).flip(-1)
    return (scores - taken).masked_fill(~visible, -math.inf).exp()
