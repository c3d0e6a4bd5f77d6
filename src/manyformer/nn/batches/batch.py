"""Batches: CPU tensors, one sequence per row, with their counts, layouts and way to a device; those of token rows.

Batches of other inputs are in `media_batches`, those of episodes in `episode_batches`."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, tree_map
from manyformer.nn.runtime.devices import device_kind, send
from manyformer.nn.runtime.torch_internals import is_traced

SegmentLayout = PackedLayout | ContiguousLayout | None

# The target of a position that is not scored: torch's convention for cross-entropy.
IGNORE_INDEX = -100

PLACE_STEPS = 32
"""The number of scored tokens of a batch is rounded up to one of so many numbers."""


@runtime_checkable
class Batch(Protocol):
    """A NamedTuple of tensors with one row per sequence: what data produces and the loss of a model takes.

    Beside segment ids it may have their layout, which what cuts rows or columns must leave out."""

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


@runtime_checkable
class ListsPlaces(Protocol):
    """A batch whose model computes with some of its entries, found by their values, such as tokens with a target.

    A GPU that is to find them makes the host wait for their number."""

    def with_places(self) -> Self:
        """The batch with lists of these entries, made on the host."""


class TextUnits(NamedTuple):
    """The number of targets of a split, and of the characters and bytes of the text that they encode."""

    targets: int
    characters: int
    bytes: int


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """The batch with its tensors on `device`; those that are there already stay as they are.

    Copies are asynchronous where the device has such, from pinned memory. What only the host can read without waiting
    is in the batch before: the layouts of its rows, and its places.
    """
    if device_kind(device).is_host:
        return batch
    # segment ids on a GPU could only be read by waiting for it
    on_host: Any = with_layouts(batch)
    if isinstance(on_host, ListsPlaces):
        on_host = on_host.with_places()
    moved: BatchT = tree_map(lambda tensor: send(tensor, device), on_host)
    return moved


def with_layouts(batch: BatchT) -> BatchT:
    """The batch with the layouts of its segment ids that are on the host, in the fields beside them.

    A field `NAME_layout`, or `layout`, belongs to the segment ids `NAME_segments`, or `segments`."""
    layouts = {}
    for name in getattr(batch, "_fields", ()):
        if name.endswith("layout") and getattr(batch, name) is None:
            segments = getattr(batch, f"{name.removesuffix('layout')}segments")
            if segments is not None and segments.device.type == "cpu":
                layouts[name] = read_segment_layout(segments)
    if not layouts:
        return batch
    replaced: BatchT = batch._replace(**layouts)  # type: ignore[attr-defined]
    return replaced


def segment_layout(segments: Int[Tensor, "b l"], known: SegmentLayout = None) -> SegmentLayout:
    """The layout of these segment ids if it is `known` or can be read, which it cannot where they are on a device.

    A graph that is being compiled knows none: it would be compiled again for the documents of each batch.
    """
    if is_traced():
        return None
    if known is not None or segments.device.type != "cpu":
        return known
    return read_segment_layout(segments)


def read_segment_layout(segments: Int[Tensor, "b l"]) -> SegmentLayout:
    """The layout of segment ids on the host; None where a document is in several pieces, which has no simple layout."""
    ids = segments.numpy()
    # one document fills every row
    if ids.shape[1] and not ids.any():
        return ContiguousLayout()
    if not ids.size:
        return PackedLayout((), ())
    # (b, l): whether a document or padding begins at a column; a row begins with a start
    is_start = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=is_start[:, 1:])
    rows, starts = is_start.nonzero()
    documents = ids[rows, starts]
    is_same_row = rows[1:] == rows[:-1]
    # a document ends where the next one of its row begins, or with the row
    stops = np.full_like(starts, ids.shape[1])
    stops[:-1][is_same_row] = starts[1:][is_same_row]
    if (documents == PADDING_SEGMENT).any():
        is_document = documents != PADDING_SEGMENT
        rows, starts, stops, documents = (part[is_document] for part in (rows, starts, stops, documents))
        is_same_row = rows[1:] == rows[:-1]
    # ids that ascend, as packing numbers them, do not repeat
    if not (documents[1:] > documents[:-1])[is_same_row].all():
        # the pieces of a row by their ids, where equal ones are neighbors
        order = np.lexsort((documents, rows))
        rows_in_order = rows[order]
        documents_in_order = documents[order]
        is_repeated = documents_in_order[1:] == documents_in_order[:-1]
        if (is_repeated & (rows_in_order[1:] == rows_in_order[:-1])).any():
            return None
    return PackedLayout(tuple(zip(rows.tolist(), starts.tolist(), stops.tolist())), tuple(documents.tolist()))


def count_scored(targets: Tensor) -> int:
    """The number of targets that are not ignored."""
    return int((targets != IGNORE_INDEX).sum())


def count_valid(tokens: Tensor, segments: Tensor | None) -> int:
    """The number of tokens that are not padding."""
    if segments is None:
        return tokens.numel()
    return int((segments != PADDING_SEGMENT).sum())


def ignore_all(targets: Tensor) -> Tensor:
    """As many targets, each of which is ignored."""
    return torch.full_like(targets, IGNORE_INDEX)


def scored_places(targets: Tensor) -> Tensor:
    """The numbers of the targets that are not ignored, in a flat order, and then of a few that are.

    Their number is rounded up to one of a few, because compiled code is made for each shape."""
    is_ignored = (targets == IGNORE_INDEX).flatten()
    # rounded up, so that no target is left out; the places beyond are ignored by the loss
    step = max(1, len(is_ignored) // PLACE_STEPS)
    count = -(-(len(is_ignored) - int(is_ignored.sum())) // step) * step
    # a stable sort keeps the order of the places, those with a target first
    return is_ignored.to(torch.uint8).argsort(stable=True)[:count]


NO_NEIGHBOUR = -1
"""Stands for a retrieved token where there are fewer than there could be."""


class CausalLMBatch(NamedTuple):
    """A language model's rows: `targets[:, i]` is the token that follows `tokens[:, i]`, or `IGNORE_INDEX`."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    # Equal ids are one document, -1 is padding; None: every row is one document without padding.
    segments: Int64[Tensor, "b l"] | None = None
    # The k tokens retrieved for each token (those that followed similar contexts), `NO_NEIGHBOUR` for none; None: no
    # retrieval.
    neighbours: Int64[Tensor, "b l k"] | None = None
    # The position of each token in its text, -1 for padding; None unless the text is held out.
    text_positions: Int64[Tensor, "b l"] | None = None
    # Where the documents of `segments` are; None where nobody has read it.
    layout: SegmentLayout = None

    def in_pieces(self, length: int) -> "Iterator[CausalLMBatch]":
        """The batch in pieces of at most `length` columns, from left to right."""
        for start in range(0, self.tokens.shape[1], length):
            columns = slice(start, start + length)
            yield CausalLMBatch(
                self.tokens[:, columns],
                self.targets[:, columns],
                None if self.segments is None else self.segments[:, columns],
                None if self.neighbours is None else self.neighbours[:, columns],
                None if self.text_positions is None else self.text_positions[:, columns],
            )

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class Seq2SeqBatch(NamedTuple):
    """Pairs of a source and a sequence y: `target` is BOS + y, `targets` is y + EOS, `IGNORE_INDEX` at padding.

    A source is what the model's encoder reads: tokens (b, s), images (b, h, w, c), frames (b, f, m). The layouts say
    where the documents of both are, None where nobody has read it; so does `layout` of the batches below."""

    source: Shaped[Tensor, "b *source"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    source_segments: Int64[Tensor, "b s"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None
    source_layout: SegmentLayout = None
    target_layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class MaskedLMBatch(NamedTuple):
    """A masked language model's rows: `tokens` are corrupted, `targets` the originals of selected tokens.

    Targets of all other tokens are `IGNORE_INDEX`. `roles` are 1 for global tokens and 0 otherwise; `parts` number the
    parts (such as sentences) of each document from 0, -1 for none. Both are optional inputs of a model. `mask` is the
    id of the mask token, once for each row, for losses that hide more tokens than the batch does.
    """

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None
    mask: Int64[Tensor, " b"] | None = None
    # Among all tokens, those with a target and perhaps some others; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))

    def with_places(self) -> Self:
        return self._replace(scored=scored_places(self.targets))


class ClassificationBatch(NamedTuple):
    """A text classifier's rows, with one class index per row; `roles` and `parts` are as of `MaskedLMBatch`."""

    tokens: Int64[Tensor, "b l"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None
    layout: SegmentLayout = None

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
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))


class TaggingBatch(NamedTuple):
    """A tagger's rows: the class of each word is the target of its first token, `IGNORE_INDEX` elsewhere.

    `trees` holds depth, preorder number and last descendant's preorder number of each token's node
    (`manyformer.nn.structures`), -1 for tokens in no tree."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    trees: Int64[Tensor, "b l 3"] | None = None
    # Among all tokens, those with a target and perhaps some others; None where they have not been listed.
    scored: Int64[Tensor, " n"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))

    def with_places(self) -> Self:
        return self._replace(scored=scored_places(self.targets))
