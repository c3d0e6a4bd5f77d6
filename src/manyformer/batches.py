"""The batch records that data loading produces: CPU tensors, one sequence per row, int64 except for images."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, tree_map

# The target of a position that is not scored: torch's convention for cross-entropy.
IGNORE_INDEX = -100


@runtime_checkable
class Batch(Protocol):
    """A NamedTuple of tensors with one row per sequence: what data produces and the loss of a model takes."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...

    def target_count(self) -> int:
        """The number of targets that are not ignored: what a training step is normalized by."""

    def token_count(self) -> int:
        """The number of tokens trained on: the targets, or all non-padding tokens if only some have a target."""

    def ignored(self) -> Self:
        """The same rows with every target ignored."""


BatchT = TypeVar("BatchT", bound=Batch)


class TextUnits(NamedTuple):
    """The number of targets of a split, and of the characters and bytes of the text that they encode."""

    targets: int
    characters: int
    bytes: int


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """Copy the batch's tensors to `device`, asynchronously where possible."""
    if device.type == "cpu":
        return batch
    moved: BatchT = tree_map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), batch)
    return moved


def count_scored(targets: Tensor) -> int:
    """The number of targets that are not ignored."""
    return int((targets != IGNORE_INDEX).sum())


def count_valid(tokens: Tensor, segments: Tensor | None) -> int:
    """The number of tokens that are not padding."""
    return tokens.numel() if segments is None else int((segments != PADDING_SEGMENT).sum())


def ignore_all(targets: Tensor) -> Tensor:
    """As many targets, each of which is ignored."""
    return torch.full_like(targets, IGNORE_INDEX)


class CausalLMBatch(NamedTuple):
    """A language model's rows: `targets[:, i]` is the token that follows `tokens[:, i]`, or `IGNORE_INDEX`."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    # Equal ids are one document, -1 is padding; None: every row is one document without padding.
    segments: Int64[Tensor, "b l"] | None = None
    # The k tokens retrieved for each token (those that followed similar contexts), 0 for none; None: no retrieval.
    neighbours: Int64[Tensor, "b l k"] | None = None
    # The position of each token in its text, -1 for padding; None unless the text is held out.
    text_positions: Int64[Tensor, "b l"] | None = None

    def in_pieces(self, length: int) -> "Iterator[CausalLMBatch]":
        """The batch in pieces of at most `length` columns, from left to right."""
        for start in range(0, self.tokens.shape[1], length):
            tokens, targets, *optional_parts = (None if t is None else t[:, start : start + length] for t in self)
            assert tokens is not None
            assert targets is not None
            yield CausalLMBatch(tokens, targets, *optional_parts)

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class Seq2SeqBatch(NamedTuple):
    """Pairs of a source and a sequence y: `target` is BOS + y, `targets` is y + EOS, `IGNORE_INDEX` at padding.

    A source is what the model's encoder reads: tokens (b, s), images (b, h, w, c), frames (b, f, m)."""

    source: Shaped[Tensor, "b *source"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    source_segments: Int64[Tensor, "b s"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class MaskedLMBatch(NamedTuple):
    """A masked language model's rows: `tokens` are corrupted, `targets` the originals of selected tokens.

    Targets of all other tokens are `IGNORE_INDEX`. `roles` are 1 for global tokens and 0 otherwise; `parts` number the
    parts (such as sentences) of each document from 0, -1 for none. Both are optional inputs of a model.
    """

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class ClassificationBatch(NamedTuple):
    """A text classifier's rows, with one class index per row; `roles` and `parts` are as of `MaskedLMBatch`."""

    tokens: Int64[Tensor, "b l"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels))


class AnswerSpanBatch(NamedTuple):
    """Rows of a question and a document; `targets` are the columns of the first and the last token of the answer.

    The column of the row's first token stands for no answer. `roles` are 1 for global tokens and 0 otherwise, `parts`
    number the sentences, of which the question is the first."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b 2"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class TaggingBatch(NamedTuple):
    """A tagger's rows: the class of each word is the target of its first token, `IGNORE_INDEX` elsewhere.

    `trees` holds depth, preorder number and last descendant's preorder number of each token's node
    (`manyformer.dependency_trees`), -1 for tokens in no tree."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    trees: Int64[Tensor, "b l 3"] | None = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


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

    def target_count(self) -> int:
        return count_scored(self.labels)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(labels=ignore_all(self.labels))


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

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.features[..., 0], self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))
