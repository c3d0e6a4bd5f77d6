"""Batches of images, sounds, several modalities and graphs: CPU tensors, one example per row."""

from typing import NamedTuple, Self

from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from manyformer.nn.batches.batch import (
    IGNORE_INDEX,
    SegmentLayout,
    count_scored,
    count_valid,
    ignore_all,
    scored_places,
)


class ImageClassificationBatch(NamedTuple):
    """Images with channels last, and one class index per image."""

    pixels: UInt8[Tensor, "b height width channels"]
    labels: Int64[Tensor, " b"]

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return self.pixels.numel()

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels))


class AudioClassificationBatch(NamedTuple):
    """Log-mel features of recordings, one frame per column, and one class index per recording.

    `segments` are 0 for frames and -1 for padding; None means that no frame is padding."""

    features: Float[Tensor, "b f m"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b f"] | None = None

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return count_valid(self.features[..., 0], self.segments)

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels))


class TranscriptionBatch(NamedTuple):
    """Log-mel features of recordings, one frame per column, and what is said: target and targets as of a pair of texts.

    `segments` are 0 for frames and -1 for padding; None means that no frame is padding."""

    features: Float[Tensor, "b f m"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    segments: Int64[Tensor, "b f"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None
    # Where the documents of `target_segments` are; None where nobody has read it.
    target_layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class ModalitiesBatch(NamedTuple):
    """Examples that may have an image, frames of sound and a text, with a class index each; None: no row has the part.

    The segments of a part are -1 where a row does not have it, and at its padding; None means neither occurs."""

    labels: Int64[Tensor, " b"]
    images: UInt8[Tensor, "b height width channels"] | None = None
    frames: Float[Tensor, "b f m"] | None = None
    tokens: Int64[Tensor, "b t"] | None = None
    image_segments: Int64[Tensor, " b"] | None = None
    frame_segments: Int64[Tensor, "b f"] | None = None
    token_segments: Int64[Tensor, "b t"] | None = None
    # The rows with a label; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    # Where the texts of `token_segments` are; None where nobody has read it.
    token_layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels), scored=None)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The arguments of a model's `forward`."""
        # all fields from the images to the segments of tokens
        return self[1:7]

    def with_places(self) -> Self:
        return self._replace(scored=(self.labels != IGNORE_INDEX).nonzero()[:, 0])


class GraphBatch(NamedTuple):
    """Rows of graphs: features of the nodes, directed edges as columns (source, target) of the row, -1 for padding.

    `targets` has a class index for each node, or for each row, which is one graph then. `segments` numbers the graphs
    of a row, -1 is no node; None means that each row is one graph. `columns` are those of the `features` that are given
    where most are zero; None means that all are given. `edge_features` are vectors of the edges, and
    `eigenvectors` the Laplacian positions of the nodes."""

    features: Float[Tensor, "b l k"]
    edges: Int64[Tensor, "b m 2"]
    targets: Int64[Tensor, "b l"] | Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None
    columns: Int64[Tensor, "b l k"] | None = None
    edge_features: Float[Tensor, "b m f"] | None = None
    eigenvectors: Float[Tensor, "b l p"] | None = None
    # Among the nodes of all rows, those with a target and perhaps some others; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    # Among the edges of all rows, those that join two nodes, and those that join a node with itself.
    links: Int64[Tensor, " m"] | None = None
    loops: Int64[Tensor, " n"] | None = None
    # Where the graphs of `segments` are; None where nobody has read it.
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.features[..., 0], self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The arguments of a model's `forward`."""
        return self.features, self.edges, *self[3:7]

    def with_places(self) -> Self:
        # (b * m,): padding is -1 on both sides
        sources, targets = self.edges.flatten(0, 1).unbind(1)
        is_edge = sources >= 0
        links = (is_edge & (sources != targets)).nonzero()[:, 0]
        loops = (is_edge & (sources == targets)).nonzero()[:, 0]
        return self._replace(scored=scored_places(self.targets), links=links, loops=loops)
