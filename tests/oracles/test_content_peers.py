"""Clusters and sorted blocks against the released packages, where those compute the same thing.

`routing-transformer` leaves queries as long as they are, which is given up here by vectors of one length, and its mean
over clusters divides by 1e-5 too much. `sinkhorn-transformer` is right for causal models alone; it gives each block one
earlier block, at part weight, a learned one to the first, and turns half of its heads by a block: the other heads are
compared, with its own matrix.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyformer.nn.clustered import bucket_chunks, sinkhorn_attention
from manyformer.nn.clustered.centroids import centroid_sums, nearest_centroid

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(("clusters", "size"), [(1, 20), (4, 5), (3, 20)])
def test_balanced_clusters_are_those_of_routing_transformer(clusters: int, size: int) -> None:
    released = pytest.importorskip("routing_transformer.routing_transformer", reason="needs routing-transformer")
    layer = released.KmeansAttention(clusters, size, 2, 6, causal=True, shared_qk=True).eval()
    layer.kmeans.initted.fill_(True)
    layer.kmeans.means.copy_(F.normalize(layer.kmeans.means, dim=-1))
    k, v = F.normalize(torch.randn(2, 2, 20, 6), dim=-1).requires_grad_(), torch.randn(2, 2, 20, 6, requires_grad=True)
    reference, loss = layer(k, k, v)
    near = k @ layer.kmeans.means.mT
    ours = bucket_chunks.balanced_attention(
        k, v, bucket_chunks.top_members(near.detach(), size), scale=1 / math.sqrt(6)
    )
    # a count of 1 is 1.00001 there
    torch.testing.assert_close(ours, reference, atol=2e-6, rtol=2e-5)
    grad_output = torch.randn_like(reference)
    assert_same_direction(
        *(torch.autograd.grad(y, (k, v), grad_output, retain_graph=True) for y in (ours, reference)), k
    )
    # a mean over channels too
    torch.testing.assert_close(loss, 1e-4 * (2 - 2 * near.amax(-1)).mean() / 6)


def assert_same_direction(actual: Any, expected: Any, k: torch.Tensor) -> None:
    """Equal gradients; those of keys across them only, since the released layer makes their length 1 once more."""
    across = [x - (x * k).sum(-1, keepdim=True) * k for x in (actual[0], expected[0])]
    torch.testing.assert_close(across[0], across[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-4, rtol=0)


def test_a_round_of_k_means_is_that_of_routing_transformer() -> None:
    released = pytest.importorskip("routing_transformer.routing_transformer", reason="needs routing-transformer")
    x, means = (F.normalize(torch.randn(*shape), dim=-1) for shape in ((3, 2, 20, 6), (2, 4, 6)))
    keys = x.transpose(0, 1).flatten(1, 2)
    actual = centroid_sums(keys, nearest_centroid(keys, means), 4)
    length = actual.sums.norm(dim=-1, keepdim=True)
    ours = torch.where(length > 0, actual.sums / length, means)
    torch.testing.assert_close(ours, released.kmeans_iter(x, means))


def test_causal_sorted_blocks_are_those_of_sinkhorn_transformer() -> None:
    released = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer", reason="needs sinkhorn-transformer")
    size, blocks = 4, 5
    layer = released.SinkhornCausalAttention(size, 12, 6, 2, size * blocks, n_top_buckets=1).eval()
    k, v, noise = (torch.randn(2, 2, size * blocks, 6) for _ in range(3))
    # queries like keys, so that it chooses other blocks than the learned one
    q = k + 0.5 * noise
    with torch.no_grad():
        # a channel in which only its learned key for the first block has anything, and nobody looks at that key
        q[..., 0], k[..., 0] = 1.0, 0.0
        layer.null_keys[..., 0] = -1e4
        reference = layer(q, k, v)[:, 0]
        matrix = layer.sort_net(q[:, 0], k[:, 0], topk=1)
    # its first column is the learned block
    sort = matrix[:, None, :, 1:].clone()
    cut = [x[:, :1].unflatten(2, (blocks, size)) for x in (q, k, v)]
    ours = sinkhorn_attention.sinkhorn_attention(*cut, sort, causal=True, scale=1 / math.sqrt(6)).flatten(2, 3)[:, 0]
    inside = (sort.sum(-1) > 0)[:, 0].repeat_interleave(size, 1)
    inside[:, :size] = True
    assert inside[:, size:].any()
    torch.testing.assert_close(ours[inside], reference[inside], atol=1e-5, rtol=0)


def test_balancing_is_that_of_sinkhorn_transformer() -> None:
    """It scales rows and then columns: of the transpose, columns and then rows, as here after the first rows."""
    released = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer", reason="needs sinkhorn-transformer")
    logits = torch.randn(3, 6, 6)
    reference = released.sinkhorn_sorting_operator(logits.log_softmax(-1).mT, n_iters=7).mT
    torch.testing.assert_close(sinkhorn_attention.balance(logits, steps=7, causal=False), reference)
