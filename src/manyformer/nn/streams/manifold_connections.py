"""Manifold-constrained hyper-connections (mHC): weights between bounds, and mixing whose columns sum to 1."""

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.runtime.length_norms import rms_norm
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.runtime.training_hooks import UndecayedParameters
from manyformer.nn.streams.hyper_connections import NORM_EPS, Connection, ConnectionWeights

SINKHORN_STEPS = 20
"""How often rows and columns are divided by their sums, in the paper and in the released models."""

EPS = 1e-6
"""What is added to weights between 0 and 1, and to the sums that they are divided by."""

CLOSED = -8.0
"""The logit of what is nearly off at first."""


def sinkhorn(logits: Float[Tensor, "*b n n"], *, steps: int = SINKHORN_STEPS) -> Float[Tensor, "*b n n"]:
    """A softmax of each row whose columns, and `steps` - 1 times rows and columns, are divided by their sums.

    Columns then sum to 1 within 2e-6, rows as far as the steps went: with 20 to 2e-3 for standard normal logits, and
    to 0.1 for ten times as large ones."""
    # rows and columns first: sums over the few last numbers of a tensor take two and a half times as long on a CPU
    weights = logits.movedim((-2, -1), (0, 1)).contiguous().softmax(1) + EPS
    weights = weights / (weights.sum(0, keepdim=True) + EPS)
    for _ in range(steps - 1):
        weights = weights / (weights.sum(1, keepdim=True) + EPS)
        weights = weights / (weights.sum(0, keepdim=True) + EPS)
    return weights.movedim((0, 1), (-2, -1))


class _ProjectedLogits(nn.Module):
    """Logits in `parts` of sizes, one linear function of the n streams side by side, normalized together.

    Part i is scale[i] fn_i z + base_i with z = RMS(flat h), in which `fn` is (sum of sizes, n d). It begins as `base`:
    fn is zero, and `scale` 0.01."""

    def __init__(self, dim: int, streams: int, base: list[Tensor]) -> None:
        super().__init__()
        self.parts = tuple(len(part) for part in base)
        self.fn = nn.Parameter(torch.zeros(sum(self.parts), streams * dim))
        self.base = nn.Parameter(torch.cat(base))
        self.scale = nn.Parameter(torch.full((len(base),), 0.01))

    def logits(self, h: Float[Tensor, "b l n d"]) -> list[Float[Tensor, "b l part"]]:
        """The logits of each part."""
        products = F.linear(rms_norm(h.flatten(-2), eps=NORM_EPS), self.fn.to(h.dtype))
        bases = self.base.to(h.dtype).split_with_sizes(self.parts)
        scales = self.scale.to(h.dtype)
        return [
            product * scale + base
            for product, scale, base in zip(products.split_with_sizes(self.parts, -1), scales, bases)
        ]


@final
class ManifoldConnection(_ProjectedLogits, Connection, UndecayedParameters):
    """Weights of each token between bounds, and streams mixed by Sinkhorn's normalization (Xie et al. 2025).

    arXiv:2512.24880, as DeepSeek-V4 computes it: from logits a, p and c the branch reads the streams with sigmoid(a) +
    1e-6, is written with 2 sigmoid(p), and `sinkhorn`(c) mixes. At first branch number m reads stream m mod n, is
    written to all with 1, and each stream keeps all but some thousandths. These initial values are ours: if all
    branches read the mean, equal streams would get equal gradients, and would stay equal for ever."""

    undecayed: ClassVar[tuple[str, ...]] = ("fn",)

    def __init__(self, dim: int, streams: int, number: int) -> None:
        mix = torch.full((streams, streams), CLOSED).fill_diagonal_(0.0)
        super().__init__(dim, streams, [_read_logits(streams, number), torch.zeros(streams), mix.flatten()])

    def forward(self, h: Float[Tensor, "b l n d"]) -> ConnectionWeights:
        read, write, mix = self.logits(h)
        streams = h.shape[-2]
        mix = mix.view(*mix.shape[:-1], streams, streams)
        return ConnectionWeights(read.sigmoid() + EPS, sinkhorn(mix), 2 * write.sigmoid())


@final
class UnmixedConnection(_ProjectedLogits, Connection, UndecayedParameters):
    """`ManifoldConnection` without mixing, as Hunyuan's HY-V4 computes it: streams differ by what is written alone."""

    undecayed: ClassVar[tuple[str, ...]] = ("fn",)

    def __init__(self, dim: int, streams: int, number: int) -> None:
        super().__init__(dim, streams, [_read_logits(streams, number), torch.zeros(streams)])

    def forward(self, h: Float[Tensor, "b l n d"]) -> ConnectionWeights:
        read, write = self.logits(h)
        return ConnectionWeights(read.sigmoid() + EPS, None, 2 * write.sigmoid() + EPS)


@final
class ManifoldHead(_ProjectedLogits, UndecayedParameters):
    """One stream of n: their sum with the weights sigmoid(a) + 1e-6 of each token, at first their mean."""

    undecayed: ClassVar[tuple[str, ...]] = ("fn",)

    def __init__(self, dim: int, streams: int) -> None:
        super().__init__(dim, streams, [torch.full((streams,), -math.log(streams - 1))])

    def forward(self, h: Float[Tensor, "b l n d"]) -> Float[Tensor, "b l d"]:
        with autocast_disabled(h.device):
            wide = h.to(torch.promote_types(h.dtype, torch.float32))
            (logits,) = self.logits(wide)
            y = ((logits.sigmoid() + EPS)[..., None, :] @ wide).squeeze(-2)
        return y.to(h.dtype)


def _read_logits(streams: int, number: int) -> Tensor:
    """Logits with which branch `number` reads stream `number` mod n almost alone, by weights that sum to 1."""
    logits = torch.full((streams,), CLOSED, dtype=torch.double)
    logits[number % streams] = torch.logit(1 - (streams - 1) * logits[0].sigmoid())
    return logits.float()
