"""Conversion of trained attention to collaborative attention, whose heads share query and key dimensions."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import FloatArray
from manyformer.models.model import Model
from manyformer.models.scores import rank_key
from manyformer.nn.attention.attention import Attention, named_attention
from manyformer.nn.attention.collaborative_attention import CollaborativeAttention
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.registry import REMOVED_HEADS, SHARED_QK_DIM, build, get_recipe

COUNTERPART_RECIPES = {"transformer-lm": "collaborative", "bert": "collaborative-encoder"}
"""The recipe with shared dimensions that models of a recipe can be converted to."""


class HeadSharingResult(NamedTuple):
    """The converted model, and for each attention layer by name the relative error of its score matrices."""

    model: Model
    errors: dict[str, float]


class CanonicalFactors(NamedTuple):
    """T[x, h, y] = sum over r of query[x, r] mixing[h, r] key[y, r], and the relative error of this decomposition."""

    query: FloatArray
    mixing: FloatArray
    key: FloatArray
    error: float


def collaborate(
    model: Model, *, shared: int, recipe: str | None = None, rounds: int = 100, starts: int = 2, seed: int = 0
) -> HeadSharingResult:
    """Convert `model` so that all heads of a layer share `shared` query and key dimensions; nothing else changes.

    The result is a model of the same recipe with `shared_qk_dim`, or of `recipe`, its counterpart with `shared_dim`.

    Cordonnier et al. (2020, arXiv:2006.16362), section 3.2: the products of the heads' projections form one tensor,
    which is decomposed by alternating least squares of at most `rounds` iterations. Of `starts` initializations, the
    first from the heads' largest singular vectors, the others random, the best result is used. With as many dimensions
    as the model has the result is exact; with fewer, tensorly is needed. Raises UserError for a model whose heads
    cannot share, and for too many dimensions."""
    counterpart = _build_counterpart(model, recipe or model.spec.recipe, shared)
    errors = dict[str, float]()
    copied_weights = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, Attention):
            shared_layer = counterpart.get_submodule(name)
            assert isinstance(shared_layer, CollaborativeAttention)
            errors[name] = share_dimensions(layer, shared_layer, rounds=rounds, starts=starts, seed=seed)
            # those of attention are set already, under other names
            copied_weights = {key: value for key, value in copied_weights.items() if not key.startswith(f"{name}.")}
    for key, value in counterpart.state_dict().items():
        if key in copied_weights:
            value.copy_(copied_weights[key])
    counterpart.tokenizer = model.tokenizer
    return HeadSharingResult(counterpart.train(model.training), errors)


@torch.no_grad()
def share_dimensions(layer: Attention, target: CollaborativeAttention, *, rounds: int, starts: int, seed: int) -> float:
    """Set the weights of `target` so that it approximates `layer`; returns the relative error of the scores.

    Query biases become the content bias of the keys, which is exact; key biases add the same number to all keys of a
    query, which the softmax ignores."""
    kernel = layer.kernel
    heads = layer.heads
    assert isinstance(kernel, SoftmaxKernel)
    assert target.kernel.scale is not None
    assert layer.q_proj is not None
    key = layer.kv_shape.head_dim
    q = layer.q_proj.weight
    k = layer.kv_proj.weight[: heads * key]
    factors = factorize(
        _rows_by_head(q, heads), _rows_by_head(k, heads), target.shared, rounds=rounds, starts=starts, seed=seed
    )
    # scores stay scaled by the original head dimension
    scale = (key**-0.5 if kernel.scale is None else kernel.scale) / target.kernel.scale
    for weight, factor in (
        (target.q_proj.weight, factors.query.T),
        (target.k_proj.weight, factors.key.T),
        (target.mixing, factors.mixing),
    ):
        weight.copy_(torch.from_numpy(np.ascontiguousarray(factor)))
    target.mixing.mul_(scale)
    bias = torch.zeros_like(q[:, 0]) if layer.q_proj.bias is None else layer.q_proj.bias
    target.key_bias.weight.copy_(scale * torch.einsum("ha,had->hd", bias.view(heads, key), k.view(heads, key, -1)))
    target.copy_values(layer)
    return factors.error


def factorize(q: FloatArray, k: FloatArray, shared: int, *, rounds: int, starts: int, seed: int) -> CanonicalFactors:
    """The canonical polyadic decomposition of rank `shared` of the products q_h^T k_h of all heads, (h, e, d) each."""
    heads, width, _ = q.shape
    # each dimension serves one head: exact, and no decomposition is needed
    if shared == heads * width:
        mixing = np.repeat(np.eye(heads), width, axis=1)
        return CanonicalFactors(q.reshape(shared, -1).T, mixing, k.reshape(shared, -1).T, 0.0)
    tensor = np.einsum("hax,hay->xhy", q, k)
    initial = _svd_factors(q, k, shared)
    candidates = [_alternate_least_squares(tensor, initial, rounds)]
    generator = np.random.default_rng(seed)
    for _ in range(starts - 1):
        random_factors = [generator.standard_normal((size, shared)) for size in tensor.shape]
        candidates.append(_alternate_least_squares(tensor, random_factors, rounds))
    return min(candidates, key=lambda factors: rank_key(factors.error))


def _svd_factors(q: FloatArray, k: FloatArray, shared: int) -> list[FloatArray]:
    """The best approximation in which each dimension serves one head: the largest singular values of all heads."""
    # QR first, so that the SVD is of width x width matrices, not of the products
    (left, upper), (right, lower) = (np.linalg.qr(x.transpose(0, 2, 1)) for x in (q, k))
    u, sizes, v = np.linalg.svd(upper @ lower.transpose(0, 2, 1))
    order = np.argsort(-sizes, axis=None)[:shared]
    head, column = np.unravel_index(order, sizes.shape)
    root = np.sqrt(sizes[head, column])
    queries = (left @ u)[head, :, column].T * root
    keys = (right @ v.transpose(0, 2, 1))[head, :, column].T * root
    return [queries, np.eye(len(q))[:, head], keys]


def _alternate_least_squares(tensor: FloatArray, factors: list[FloatArray], rounds: int) -> CanonicalFactors:
    """The three factor matrices after alternating least squares, their columns scaled to equal norms."""
    try:
        import tensorly
        from tensorly.cp_tensor import CPTensor, cp_to_tensor
        from tensorly.decomposition import parafac
    except ImportError:
        raise UserError("sharing fewer dimensions needs tensorly: pip install 'manyformer[decompose]'") from None
    rank = factors[0].shape[1]
    with tensorly.backend_context("numpy"):
        initial = CPTensor((np.ones(rank), factors))
        decomposition: Any = parafac(tensor, rank, init=initial, n_iter_max=rounds, tol=1e-9, normalize_factors=False)
        rebuilt = cp_to_tensor(decomposition)
    error = float(np.linalg.norm(rebuilt - tensor) / np.linalg.norm(tensor))
    weights, matrices = decomposition
    sizes = [np.maximum(np.linalg.norm(part, axis=0), np.finfo(float).tiny) for part in matrices]
    # only the product of the three columns is determined: equal norms keep all of them in range
    mean = np.cbrt(weights * sizes[0] * sizes[1] * sizes[2])
    query, mixing, key = (part / size * mean for part, size in zip(matrices, sizes, strict=True))
    return CanonicalFactors(query, mixing, key, error)


def _rows_by_head(weight: Tensor, heads: int) -> FloatArray:
    rows_by_head: FloatArray = weight.detach().double().cpu().numpy().reshape(heads, -1, weight.shape[1])
    return rows_by_head


def _build_counterpart(model: Model, target: str, shared: int) -> Model:
    """A new model of the target recipe with shared dimensions, on the device and of the dtype of `model`."""
    recipe = model.spec.recipe
    keywords = model.spec.keywords
    own_parameters = get_recipe(recipe).signature.parameters
    layers = named_attention(model).values()
    if SHARED_QK_DIM not in own_parameters or not layers:
        raise UserError(f"the heads of {recipe} cannot share dimensions: no layer has queries and keys for each head")
    if keywords.get(REMOVED_HEADS):
        raise UserError("heads were removed from this model: let the heads of the full model share dimensions")
    width = max(layer.heads * layer.kv_shape.head_dim for layer in layers)
    if not 1 <= shared <= width:
        raise UserError(f"shared ({shared}) must be at least 1 and at most dim ({width}), which is exact")
    valid_names = get_recipe(target).signature.parameters
    for name, value in keywords.items():
        if name not in valid_names and value != own_parameters[name].default:
            raise UserError(f"{target} has no keyword {name}, which this model sets to {value}")
    shared_keywords = {name: value for name, value in keywords.items() if name in valid_names}
    parameter = next(model.parameters())
    shared_name = SHARED_QK_DIM if target == recipe else "shared_dim"
    return build(target, **shared_keywords | {shared_name: shared}).to(device=parameter.device, dtype=parameter.dtype)
