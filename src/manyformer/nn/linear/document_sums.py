"""Bidirectional linear attention: one sum of key features and values for each document."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.linear.linear_attention import divide_by_normalizer
from manyformer.nn.masks.mask import AllKeys


class DocumentSums(NamedTuple):
    """The segment ids of the documents so far, the sum for each, and the logarithm of the sum's scale.

    `document_ids` are the same for every row; a row without such a document has zeros. They are empty before the first
    key.
    """

    document_ids: tuple[int, ...] = ()
    matrix: Float[Tensor, "b n g r f"] | None = None
    log_scale: Float[Tensor, "b n g"] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no key has been added yet."""
        return not self.document_ids


def sum_keys(
    key_features: Float[Tensor, "b g s r"],
    feature_scale: Float[Tensor, "b g s"] | None,
    v: Float[Tensor, "b g s f"],
    key_positions: TokenPositions,
    previous: DocumentSums,
) -> DocumentSums:
    """Add these keys to the sums; each key must be passed once."""
    if key_features.shape[2] == 0:
        return previous
    previous_ids = previous.document_ids
    document_ids = (*previous_ids, *(number for number in _list_documents(key_positions) if number not in previous_ids))
    columns = F.pad(v, (0, 1), value=1.0)
    sums = []
    for index, document in enumerate(document_ids):
        # one document in every row: no key has to be left out
        is_single = isinstance(key_positions.layout, ContiguousLayout)
        if is_single:
            in_document = None
        else:
            in_document = (key_positions.segment_ids == document)[:, None]
        matrix, log_scale = _sum_document(key_features, feature_scale, columns, in_document)
        if index < len(previous_ids):
            assert previous.matrix is not None
            previous_scale = None
            if previous.log_scale is not None:
                previous_scale = previous.log_scale[:, index]
            matrix, log_scale = _merge_sums(previous.matrix[:, index], previous_scale, matrix, log_scale)
        sums.append((matrix, log_scale))
    if not sums:
        return previous
    log_scales = [log_scale for _, log_scale in sums if log_scale is not None]
    matrices = torch.stack([matrix for matrix, _ in sums], 1)
    return DocumentSums(document_ids, matrices, torch.stack(log_scales, 1) if log_scales else None)


def read_sums(
    query_features: Float[Tensor, "b h l r"],
    query_positions: TokenPositions,
    sums: DocumentSums,
    value_dim: int,
    floor: float,
) -> Float[Tensor, "b h l f"]:
    """The outputs, `value_dim` channels, of queries from the sum of their document; zeros if it has none."""
    if sums.matrix is None:
        return query_features.new_zeros(*query_features.shape[:3], value_dim)
    # repeat each key head for the query heads that share it
    matrix = sums.matrix.repeat_interleave(query_features.shape[1] // sums.matrix.shape[2], 2)
    if isinstance(query_positions.layout, ContiguousLayout) and sums.document_ids == (0,):
        return divide_by_normalizer(query_features @ matrix[:, 0], floor)
    # documents are few: one product for each, of which a query keeps that of its own
    y = query_features.new_zeros(*query_features.shape[:3], value_dim + 1)
    for index, document in enumerate(sums.document_ids):
        in_document = (query_positions.segment_ids == document)[:, None, :, None]
        y = torch.where(in_document, query_features @ matrix[:, index], y)
    return divide_by_normalizer(y, floor)


def document_sums_reference(
    query_features: Float[Tensor, "b h l r"],
    key_features: Float[Tensor, "b g s r"],
    feature_scale: Float[Tensor, "b g s"] | None,
    v: Float[Tensor, "b g s f"],
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    floor: float,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """Compute outputs and weights by the definition, from all pairs."""
    heads_per_group = query_features.shape[1] // key_features.shape[1]
    key_features = key_features.repeat_interleave(heads_per_group, 1)
    v = v.repeat_interleave(heads_per_group, 1)
    visible = AllKeys().dense(query_positions, key_positions, 1)
    pairs = query_features @ key_features.mT
    if feature_scale is not None:
        scale = feature_scale.repeat_interleave(heads_per_group, 1)[:, :, None].masked_fill(~visible, -torch.inf)
        # a query without any key has a maximum of -inf, and -inf minus -inf is nan
        max_scale = scale.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(query_features.dtype).min)
        pairs = pairs * (scale - max_scale).exp()
    pairs = pairs.masked_fill(~visible, 0.0)
    y = divide_by_normalizer(pairs @ F.pad(v, (0, 1), value=1.0), floor)
    return y, pairs / pairs.sum(-1, keepdim=True).clamp(min=floor)


def _list_documents(key_positions: TokenPositions) -> list[int]:
    if isinstance(key_positions.layout, ContiguousLayout):
        return [0]
    layout = key_positions.layout
    if isinstance(layout, PackedLayout) and layout.distinct_ids is not None:
        return layout.distinct_ids
    segment_ids: list[int] = torch.unique(key_positions.segment_ids).tolist()
    return [document for document in segment_ids if document != PADDING_SEGMENT]


def _sum_document(
    key_features: Tensor, feature_scale: Tensor | None, columns: Tensor, in_document: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The sum over the keys with `in_document`, divided by exp of the returned scale where features have a scale."""
    if feature_scale is None:
        return key_features.mT @ (columns if in_document is None else columns * in_document[..., None]), None
    if in_document is not None:
        feature_scale = feature_scale.masked_fill(~in_document, -torch.inf)
    log_scale = feature_scale.detach().amax(-1)
    # the sum of no keys is zero whatever the scale
    scale = (feature_scale - log_scale.masked_fill(log_scale == -torch.inf, 0.0)[..., None]).exp()
    return key_features.mT @ (columns * scale[..., None]), log_scale


def _merge_sums(
    old: Tensor, old_scale: Tensor | None, new: Tensor, new_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if old_scale is None or new_scale is None:
        return old + new, None
    # as in an online softmax: both sums relative to the larger scale, so that neither overflows
    max_scale = old_scale.maximum(new_scale)
    finite_scale = max_scale.masked_fill(max_scale == -torch.inf, 0.0)
    old_share, new_share = ((scale - finite_scale).exp()[..., None, None] for scale in (old_scale, new_scale))
    return old * old_share + new * new_share, max_scale
