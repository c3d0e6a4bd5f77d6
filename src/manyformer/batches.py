"""The records that data hands to training: tensors on the CPU, one row a sequence, int64 but for images."""

from typing import NamedTuple

from jaxtyping import Int64, UInt8
from torch import Tensor

# The target of a position that is not scored: torch's own convention for cross-entropy.
IGNORE_INDEX = -100


class CausalLMBatch(NamedTuple):
    """A language model's rows: `targets[:, i]` is the token that follows `tokens[:, i]`, or IGNORE."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    # Equal numbers are one document, -1 is padding; None: every row is one document without padding.
    segments: Int64[Tensor, "b l"] | None = None
    # Tokens that followed contexts like that of each token elsewhere, 0 for none; None: nothing was looked up.
    neighbours: Int64[Tensor, "b l k"] | None = None


class Seq2SeqBatch(NamedTuple):
    """A translation's rows: `target` is BOS + y, `targets` is y + EOS with IGNORE at padding."""

    source: Int64[Tensor, "b s"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    source_segments: Int64[Tensor, "b s"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None


class MaskedLMBatch(NamedTuple):
    """A masked language model's rows: `tokens` corrupted, `targets` the original where it was chosen, else IGNORE.

    `roles` are 1 for global tokens, 0 for others; `parts` number the stretches, such as sentences, of each document
    from 0, -1 for none. Models may have no use for them.
    """

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    roles: Int64[Tensor, "b l"] | None = None
    parts: Int64[Tensor, "b l"] | None = None


class ClassificationBatch(NamedTuple):
    """A classifier's rows: one class number for each."""

    tokens: Int64[Tensor, "b l"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None


class TaggingBatch(NamedTuple):
    """A tagger's rows: the class of each word at its first token, IGNORE elsewhere.

    `trees` are depth, preorder number and last preorder number below each token (`manyformer.dependency_trees`), -1 in
    no tree."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    trees: Int64[Tensor, "b l 3"] | None = None


class ImageClassificationBatch(NamedTuple):
    """A classifier's images, the channels of a pixel last, and one class number for each."""

    pixels: UInt8[Tensor, "b height width channels"]
    labels: Int64[Tensor, " b"]


Batch = CausalLMBatch | Seq2SeqBatch | MaskedLMBatch | ClassificationBatch | TaggingBatch | ImageClassificationBatch
