"""Graphs that are derived from token ids, for contracts and measurements of models of graphs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import GraphBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.models.graph_encoder import GraphEncoder
from manyformer.structures.graph_laplacian import laplacian_eigenvectors
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS, stand_in_vectors
from manyformer.tasks.task import Inputs
from manyformer.torch_internals import compiler_disabled


def batch_of_tokens(model: GraphEncoder, inputs: Inputs, targets: Tensor) -> GraphBatch:
    """Graphs whose nodes have the features of their token ids, joined by edges that follow from the ids."""
    tokens = inputs.tokens
    segments = inputs.segments
    features = stand_in_vectors(torch.randn, model.embed.features, tokens.device)(tokens)
    edges = edges_of_tokens(tokens, segments)
    batch = GraphBatch(features, edges, targets, segments)
    if model.edge_features:
        ends = tokens.gather(1, edges.clamp(min=0).flatten(1)).view_as(edges)
        edge_ids = (ends[..., 0] + 3 * ends[..., 1]) % STAND_IN_IDS
        batch = batch._replace(
            edge_features=stand_in_vectors(torch.randn, model.edge_features, tokens.device)(edge_ids)
        )
    if model.positions is not None:
        batch = batch._replace(eigenvectors=_eigenvectors(edges, segments, tokens, model.positions.count))
    return batch


def edges_of_tokens(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b m 2"]:
    """A tree for each document: each token but the first is joined, both ways, with an earlier one that its id names.

    The tokens of a document are adjacent."""
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if segments is None:
        segments = torch.zeros_like(tokens)
    is_start = torch.ones_like(tokens, dtype=torch.bool)
    is_start[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.where(is_start, columns, 0).cummax(1).values
    positions = columns - starts
    parents = starts + tokens % positions.clamp(min=1)
    has_parent = (positions > 0) & (segments != PADDING_SEGMENT)
    upward = torch.stack([columns, parents], -1).masked_fill(~has_parent[..., None], -1)
    return torch.cat([upward, upward.flip(-1)], 1)


@compiler_disabled
def _eigenvectors(
    edges: Int[Tensor, "b m 2"], segments: Int[Tensor, "b l"] | None, tokens: Int[Tensor, "b l"], count: int
) -> Float[Tensor, "b l k"]:
    """The Laplacian positions of each document by itself; zeros for tokens without storage."""
    vectors = torch.zeros(*tokens.shape, count, device=tokens.device)
    if tokens.is_meta:
        return vectors
    if segments is None:
        segments = torch.zeros_like(tokens)
    for row, row_segments in enumerate(segments):
        for segment in set(row_segments.tolist()) - {PADDING_SEGMENT}:
            columns = (row_segments == segment).nonzero()[:, 0]
            start = int(columns[0])
            stop = int(columns[-1]) + 1
            inside = edges[row][(edges[row] >= start).all(-1) & (edges[row] < stop).all(-1)] - start
            numbers = laplacian_eigenvectors(inside.cpu().numpy(), stop - start, count)
            vectors[row, start:stop] = torch.from_numpy(numbers).to(vectors)
    return vectors
