"""The rules by which relevance moves from the outputs of an operation to its inputs.

Voita et al. (2019, section 4), with the details of the authors' code. With the Jacobian J of y = f(x_1 .. x_k) at x,
the impact of input i on output o is z[o, i] = J[o, i] x[i] + f(0)[o] / n, where n counts the inputs of all arguments of
one sample. Input i gets sum_o R[o] (max(z, 0) / (sum_i max(z, 0) + eps) + min(z, 0) / (sum_i min(z, 0) - eps)) / 2,
scaled so that the absolute relevance of a sample stays the same. Each token is a sample, except in attention. Relevance
has an axis `t` of targets before those of the tensor that it belongs to: several predictions are explained at once.
"""

import torch
from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-5
"""Added to the sums of impacts, as in the authors' code."""

MAX_IMPACTS = 1 << 22
"""The largest number of impacts that are computed at a time."""

Relevance = Float[Tensor, "t *shape"]


def rescaled(relevances: list[Tensor], reference: Tensor, sample_dims: int) -> list[Tensor]:
    """Relevances of the arguments with the sum of absolute values of `reference`, in each sample.

    The last `sample_dims` axes are those within a sample; the relevance of a sample that has none stays zero."""
    axes = tuple(range(-sample_dims, 0))
    total = sum(relevance.abs().sum(axes, keepdim=True) for relevance in relevances)
    assert isinstance(total, Tensor)
    scale = reference.abs().sum(axes, keepdim=True) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return [relevance * scale for relevance in relevances]


def linear_relevance(
    relevance: Float[Tensor, "t *b o"],
    x: Float[Tensor, "*b i"],
    jacobian: Float[Tensor, "o i"] | Float[Tensor, "*b o i"],
    offset: Float[Tensor, " o"] | Float[Tensor, "*b o"] | None,
) -> Float[Tensor, "t *b i"]:
    """The relevance of inputs of a map with this Jacobian at each token and the value `offset` at 0, or 0 for None.

    Impacts are computed for a few tokens at a time, and only for outputs that have any relevance."""
    flat = relevance.reshape(relevance.shape[0], -1, relevance.shape[-1])
    inputs = x.reshape(-1, x.shape[-1])
    jacobians = jacobian.expand(*x.shape[:-1], *jacobian.shape[-2:]).reshape(-1, *jacobian.shape[-2:])
    if jacobian.ndim == 2:
        # a view, because a copy for each token would not fit
        jacobians = jacobian.expand(len(inputs), *jacobian.shape)
    offsets = None
    if offset is not None:
        offsets = offset.expand(*x.shape[:-1], -1).reshape(-1, offset.shape[-1])
    active_outputs = flat.ne(0).flatten(0, 1).any(0).nonzero()[:, 0]
    active_tokens = flat.ne(0).any(-1).any(0).nonzero()[:, 0]
    result = relevance.new_zeros(*flat.shape[:2], inputs.shape[-1])
    size = max(1, MAX_IMPACTS // max(1, len(active_outputs) * inputs.shape[-1]))
    for tokens in torch.split(active_tokens, size):
        impacts = jacobians[tokens[:, None], active_outputs] * inputs[tokens, None]
        if offsets is not None:
            impacts = impacts + offsets[tokens[:, None], active_outputs, None] / inputs.shape[-1]
        outputs = flat[:, tokens][..., active_outputs].transpose(0, 1)
        result[:, tokens] = _distribute(outputs, impacts).transpose(0, 1)
    [scaled] = rescaled([result], flat, 1)
    return scaled.view(relevance.shape[0], *x.shape)


def _distribute(relevance: Float[Tensor, "p t o"], impacts: Float[Tensor, "p o i"]) -> Float[Tensor, "p t i"]:
    """Relevance by the shares of the positive and of the negative impacts, half of it each."""
    positive = impacts.clamp(min=0)
    negative = impacts - positive
    by_positive = relevance / (positive.sum(-1)[:, None] + EPSILON)
    by_negative = relevance / (negative.sum(-1)[:, None] - EPSILON)
    return (by_positive @ positive + by_negative @ negative) / 2


def term_relevance(relevance: Float[Tensor, "t *b d"], impacts: list[Float[Tensor, "*b d"]]) -> list[Tensor]:
    """The relevance of arguments of which each output depends on one element each, with these impacts."""
    positive, negative = ([impact.clamp(*limits) for impact in impacts] for limits in ((0, None), (None, 0)))
    by_positive = relevance / (torch.stack(positive).sum(0) + EPSILON) / 2
    by_negative = relevance / (torch.stack(negative).sum(0) - EPSILON) / 2
    shares = [by_positive * above + by_negative * below for above, below in zip(positive, negative)]
    return rescaled(shares, relevance, 1)


def pooled_relevance(relevance: Float[Tensor, "t b d"], x: Float[Tensor, "b s d"]) -> Float[Tensor, "t b s d"]:
    """The relevance of the terms of a sum over all tokens of a row, which is one sample."""
    above = x.clamp(min=0)
    below = x.clamp(max=0)
    by_positive = relevance / (above.sum(1) + EPSILON) / 2
    by_negative = relevance / (below.sum(1) - EPSILON) / 2
    shares = by_positive[:, :, None] * above + by_negative[:, :, None] * below
    [scaled] = rescaled([shares], relevance[:, :, None], 2)
    return scaled
