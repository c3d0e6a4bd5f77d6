"""Sums of log decays along the tokens of a chunk, whose differences are as exact as sums of the tokens in between.

A pair of tokens i >= j has the factor exp(G_i - G_j), with the sums G up to each token. After strong decays G is large,
and rounding it costs the digits of what a few weak decays between i and j add up to. So G is kept as two sums: one of
multiples of a step, which float32 adds and subtracts without an error, and one of the small rest.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class DecaySums(NamedTuple):
    """The sums of log decays up to each token: `coarse` + `fine`, or those up to other tokens.

    `coarse` has no rounding error and no gradient; `fine` has at most half a step a token, and the gradient of both."""

    coarse: Float[Tensor, "*b c #r"]
    fine: Float[Tensor, "*b c #r"]

    def total(self) -> Float[Tensor, "*b c #r"]:
        """The sums as one number each, for what begins before the first token."""
        return self.coarse + self.fine

    def before(self) -> "DecaySums":
        """The sums of the tokens before each one."""
        return DecaySums(*(F.pad(part[..., :-1, :], (0, 0, 1, 0)) for part in self))


class ChunkDecays(NamedTuple):
    """The sums of the decays of a chunk, and the product `leaving` of those after each token."""

    sums: DecaySums
    leaving: Float[Tensor, "*b c #r"]


def sum_decays(decay: Float[Tensor, "*b c #r"]) -> ChunkDecays:
    """Sums and products of log decays, at most 0, of each of the c tokens.

    Decays below what the type can represent, such as -inf, are total: they count as the weakest whose exponential is
    0, so that no sum of a chunk loses digits to them."""
    coarse, fine, leaving = _SumDecays.apply(decay)  # type: ignore[no-untyped-call]
    return ChunkDecays(DecaySums(coarse, fine), leaving)


class _SumDecays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = split_decays(decay.clamp(min=-total_decay(decay.dtype)))
        coarse, fine = (sum_along_tokens(part) for part in parts)
        leaving = (coarse[..., -1:, :] - coarse).add_(fine[..., -1:, :] - fine).exp_()
        ctx.mark_non_differentiable(coarse)
        ctx.save_for_backward(leaving)
        return coarse, fine, leaving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, dfine: Tensor, dleaving: Tensor) -> Tensor:
        (leaving,) = ctx.saved_tensors
        return gradient_of_decays(dfine, dleaving * leaving)


def gradient_of_decays(dsums: Float[Tensor, "*b c r"], dleaving: Float[Tensor, "*b c r"]) -> Float[Tensor, "*b c r"]:
    """The gradient of decays from those of the sums up to each token and of the exponents of `leaving`.

    The latter are added up over the tokens before a decay: as the gradient of a difference of two sums, the gradients
    of tokens without a decay after them would cancel only up to rounding, and drown those of strong decays."""
    left_before = F.pad(dleaving[..., :-1, :], (0, 0, 1, 0))
    return sum_along_tokens(dsums, reverse=True) + sum_along_tokens(left_before)


def split_decays(decay: Float[Tensor, "*b c r"]) -> tuple[Float[Tensor, "*b c r"], Float[Tensor, "*b c r"]]:
    """Decays as multiples of the step of a chunk, and the rest, without an error."""
    step = _step(decay.shape[-2], decay.dtype)
    coarse = (decay * (1 / step)).round_().mul_(step)
    return coarse, decay - coarse


def total_decay(dtype: torch.dtype) -> float:
    """The least whole number of nats whose decay is 0 in this type: 104 in float32."""
    info = torch.finfo(dtype)
    return float(math.ceil(math.log(2) - math.log(info.smallest_normal * info.eps)))


def sum_along_tokens(x: Float[Tensor, "*b c r"], *, reverse: bool = False) -> Float[Tensor, "*b c r"]:
    """Sums along the tokens up to each one, or from each one on."""
    if x.shape[-1] > 1 and x.device.type in ("cpu", "meta"):
        # for many channels three times as fast as a cumulated sum, which also has to be turned around twice; planned
        # like that on `meta`
        ones = x.new_ones(x.shape[-2], x.shape[-2])
        return (ones.triu() if reverse else ones.tril()) @ x
    if reverse:
        return x.flip(-2).cumsum(-2).flip(-2)
    return x.cumsum(-2)


def _step(length: int, dtype: torch.dtype) -> float:
    """The least power of two of which the sum of so many total decays is an exact multiple."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return float(2.0 ** (math.ceil(math.log2(total_decay(dtype) * length)) - digits))
