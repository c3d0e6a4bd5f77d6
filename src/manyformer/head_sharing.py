"""Trained heads made to share the dimensions of their queries and keys, by decomposing what they compute."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.attention import Attention
from manyformer.errors import UserError
from manyformer.kernels import SoftmaxKernel
from manyformer.mixers.collaborative_attention import CollaborativeAttention
from manyformer.models import Model
from manyformer.recipes import build, get_recipe

COUNTERPART_RECIPES = {"transformer-lm": "collaborative", "bert": "collaborative-encoder"}
"""The recipe that a model of a recipe can be made one of."""

FloatArray = NDArray[np.float64]


class HeadSharingResult(NamedTuple):
    """The new model; of each of its attentions by name, how far its scores' weights are from the old, relatively."""

    model: Model
    errors: dict[str, float]


class CanonicalFactors(NamedTuple):
    """T[x, h, y] = sum over r of query[x, r] mixing[h, r] key[y, r], and the relative error of that."""

    query: FloatArray
    mixing: FloatArray
    key: FloatArray
    error: float


def collaborate(model: Model, *, shared: int, rounds: int = 100, starts: int = 2, seed: int = 0) -> HeadSharingResult:
    """`model` with `shared` dimensions of queries and keys for all heads of a layer, and nothing else changed.

    Cordonnier et al. (2020, arXiv:2006.16362), section 3.2: the products of the heads' projections are one tensor,
    decomposed by alternating least squares of at most `rounds` rounds, the best of `starts`: the first from the heads'
    own largest singular vectors, the others from random numbers. With as many dimensions as there were the result is
    exact. Needs tensorly otherwise. Raises UserError for a recipe that has no such counterpart, and for too many
    dimensions.
    """
    fresh = _counterpart(model, shared)
    found: dict[str, float] = {}
    kept = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, Attention):
            other = fresh.get_submodule(name)
            assert isinstance(other, CollaborativeAttention)
            found[name] = share_dimensions(layer, other, rounds=rounds, starts=starts, seed=seed)
            kept = {key: value for key, value in kept.items() if not key.startswith(f"{name}.")}
    for key, value in fresh.state_dict().items():
        if key in kept:
            value.copy_(kept[key])
    fresh.tokenizer = model.tokenizer
    return HeadSharingResult(fresh.train(model.training), found)


@torch.no_grad()
def share_dimensions(layer: Attention, to: CollaborativeAttention, *, rounds: int, starts: int, seed: int) -> float:
    """Make `to` compute what `layer` does, as nearly as its dimensions allow; gives the relative error of the scores.

    Biases of queries become what keys count by themselves, which is exact; those of keys add the same to all keys of a
    query, which the softmax does not see.
    """
    kernel, heads = layer.kernel, layer.heads
    assert isinstance(kernel, SoftmaxKernel)
    assert to.kernel.scale is not None
    assert layer.q_proj is not None
    groups, key, value = layer.kv_shape
    assert groups == heads
    q, (k, v) = layer.q_proj.weight, torch.split(layer.kv_proj.weight, [heads * key, heads * value])
    found = factorise(_by_head(q, heads), _by_head(k, heads), to.shared, rounds=rounds, starts=starts, seed=seed)
    # scores are scaled by the old width, whatever the new one is
    scale = (key**-0.5 if kernel.scale is None else kernel.scale) / to.kernel.scale
    for weight, factor in (
        (to.q_proj.weight, found.query.T),
        (to.k_proj.weight, found.key.T),
        (to.mixing, found.mixing),
    ):
        weight.copy_(torch.from_numpy(np.ascontiguousarray(factor)))
    to.mixing.mul_(scale)
    bias = torch.zeros_like(q[:, 0]) if layer.q_proj.bias is None else layer.q_proj.bias
    to.content.weight.copy_(scale * torch.einsum("ha,had->hd", bias.view(heads, key), k.view(heads, key, -1)))
    to.v_proj.weight.copy_(v)
    to.v_proj.bias.copy_(0.0 if layer.kv_proj.bias is None else layer.kv_proj.bias[heads * key :])
    to.out_proj.load_state_dict(layer.out_proj.state_dict())
    return found.error


def factorise(q: FloatArray, k: FloatArray, shared: int, *, rounds: int, starts: int, seed: int) -> CanonicalFactors:
    """The products q_h^T k_h of all heads, (h, e, d) each, as one canonical polyadic decomposition of rank `shared`."""
    heads, width, _ = q.shape
    if shared == heads * width:
        mixing = np.repeat(np.eye(heads), width, axis=1)
        return CanonicalFactors(q.reshape(shared, -1).T, mixing, k.reshape(shared, -1).T, 0.0)
    tensor = np.einsum("hax,hay->xhy", q, k)
    first = _largest(q, k, shared)
    tries = [_refined(tensor, first, rounds)]
    generator = np.random.default_rng(seed)
    for _ in range(starts - 1):
        drawn = [generator.standard_normal((size, shared)) for size in tensor.shape]
        tries.append(_refined(tensor, drawn, rounds))
    return min(tries, key=lambda found: found.error)


def _largest(q: FloatArray, k: FloatArray, shared: int) -> list[FloatArray]:
    """The best approximation in which each dimension serves one head: the largest singular values of all heads."""
    # of width x width matrices, not of the whole products
    (left, upper), (right, lower) = (np.linalg.qr(x.transpose(0, 2, 1)) for x in (q, k))
    u, sizes, v = np.linalg.svd(upper @ lower.transpose(0, 2, 1))
    order = np.argsort(-sizes, axis=None)[:shared]
    head, column = np.unravel_index(order, sizes.shape)
    root = np.sqrt(sizes[head, column])
    queries = (left @ u)[head, :, column].T * root
    keys = (right @ v.transpose(0, 2, 1))[head, :, column].T * root
    return [queries, np.eye(len(q))[:, head], keys]


def _refined(tensor: FloatArray, factors: list[FloatArray], rounds: int) -> CanonicalFactors:
    """The three factors after alternating least squares, balanced in size."""
    try:
        import tensorly
        from tensorly.cp_tensor import CPTensor, cp_to_tensor
        from tensorly.decomposition import parafac
    except ImportError:
        raise UserError("sharing fewer dimensions needs tensorly: pip install 'manyformer[decompose]'") from None
    rank = factors[0].shape[1]
    with tensorly.backend_context("numpy"):
        start = CPTensor((np.ones(rank), factors))
        found: Any = parafac(tensor, rank, init=start, n_iter_max=rounds, tol=1e-9, normalize_factors=False)
        rebuilt = cp_to_tensor(found)
    error = float(np.linalg.norm(rebuilt - tensor) / np.linalg.norm(tensor))
    weights, parts = found
    sizes = [np.maximum(np.linalg.norm(part, axis=0), np.finfo(float).tiny) for part in parts]
    mean = np.cbrt(weights * sizes[0] * sizes[1] * sizes[2])
    query, mixing, key = (part / size * mean for part, size in zip(parts, sizes, strict=True))
    return CanonicalFactors(query, mixing, key, error)


def _by_head(weight: Tensor, heads: int) -> FloatArray:
    found: FloatArray = weight.detach().double().cpu().numpy().reshape(heads, -1, weight.shape[1])
    return found


def _counterpart(model: Model, shared: int) -> Model:
    """A new model of the recipe that `model` can become, where it was and of its type."""
    recipe, keywords = model.spec
    if recipe not in COUNTERPART_RECIPES:
        raise UserError(
            f"heads of {recipe} cannot be made to share dimensions; those of {', '.join(COUNTERPART_RECIPES)} can"
        )
    if not 1 <= shared <= keywords["dim"]:
        raise UserError(f"shared ({shared}) must be at least 1 and at most dim ({keywords['dim']}), which is exact")
    known = get_recipe(COUNTERPART_RECIPES[recipe]).signature.parameters
    usual = get_recipe(recipe).signature.parameters
    for name, value in keywords.items():
        if name not in known and value != usual[name].default:
            raise UserError(f"{COUNTERPART_RECIPES[recipe]} has no {name}, which this model has as {value}")
    words = {name: value for name, value in keywords.items() if name in known}
    like = next(model.parameters())
    return build(COUNTERPART_RECIPES[recipe], **words, shared=shared).to(device=like.device, dtype=like.dtype)
