"""Features of the tokens of a chunk with one decay for each channel: factors of readers, and their inverses of keys."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.ops.decay_sums import split_decays, sum_along_tokens


class DecayScales(NamedTuple):
    """Features as `scale_by_decays` returns them, and the factor of a memory that passes the whole chunk."""

    readers: Sequence[Float[Tensor, "*b c r"]]
    early_readers: Sequence[Float[Tensor, "*b c r"]]
    keys: Sequence[Float[Tensor, "*b c r"]]
    end: Float[Tensor, "*b 1 r"]


def scale_by_decays(
    decay: Float[Tensor, "*b c r"],
    readers: Sequence[Float[Tensor, "*b c r"]],
    keys: Sequence[Float[Tensor, "*b c r"]],
    early_readers: Sequence[Float[Tensor, "*b c r"]] = (),
) -> DecayScales:
    """Readers times exp(s_i), with the sums s_i of the log decays up to token i, and keys times exp(-s_i).

    Their products then have the factors exp(s_i - s_j) of pairs. `early_readers` have those before the token's own
    decay, exp(s_(i-1)). The decays of a chunk must be weak enough for the inverse to be finite."""
    tensors = *readers, *early_readers, *keys
    *scaled, end = _ScaleByDecays.apply(decay, len(readers), len(early_readers), *tensors)  # type: ignore[no-untyped-call]
    first_key = len(readers) + len(early_readers)
    return DecayScales(scaled[: len(readers)], scaled[len(readers) : first_key], scaled[first_key:], end)


class _ScaleByDecays(torch.autograd.Function):
    """All factors share one gradient of the sums, which composed functions would add up product by product."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, readers: int, early_readers: int, *features: Tensor) -> tuple[Tensor, ...]:
        # the exponential of one sum would have the rounding error of an exponent of up to 60
        coarse, fine = split_decays(decay)
        entering = sum_along_tokens(coarse).exp_()
        del coarse
        entering.mul_(sum_along_tokens(fine).exp_())
        del fine
        inverse = entering.reciprocal()
        ctx.save_for_backward(entering, inverse, *features)
        ctx.counts = readers, early_readers
        factors = _factors(entering, inverse, readers, early_readers, len(features))
        return *(x * factor for x, factor in zip(features, factors)), entering[..., -1:, :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        entering, inverse, *features = ctx.saved_tensors
        readers, early_readers = ctx.counts
        *dscaled, dend = gradients
        factors = _factors(entering, inverse, readers, early_readers, len(features))
        dfeatures = []
        dsums = torch.zeros_like(entering)
        dsums[..., -1:, :] = dend * entering[..., -1:, :]
        for number, (x, dy, factor) in enumerate(zip(features, dscaled, factors)):
            dx = dy * factor
            if number < readers:
                dsums.addcmul_(dx, x)
            elif number < readers + early_readers:
                dsums[..., :-1, :].addcmul_(dx[..., 1:, :], x[..., 1:, :])
            else:
                dsums.addcmul_(dx, x, value=-1)
            dfeatures.append(dx)
        return sum_along_tokens(dsums, reverse=True), None, None, *dfeatures


def _factors(entering: Tensor, inverse: Tensor, readers: int, early_readers: int, features: int) -> list[Tensor]:
    if early_readers:
        before = [F.pad(entering[..., :-1, :], (0, 0, 1, 0), value=1.0)] * early_readers
    else:
        before = []
    return [entering] * readers + before + [inverse] * (features - readers - early_readers)
