"""The batch records that data loading produces: CPU tensors, one sequence per row, int64 except for images."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, State, tree_map

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


def _count_scored(targets: Tensor) -> int:
    return int((targets != IGNORE_INDEX).sum())


def _count_valid(tokens: Tensor, segments: Tensor | None) -> int:
    return tokens.numel() if segments is None else int((segments != PADDING_SEGMENT).sum())


def _ignore_all(targets: Tensor) -> Tensor:
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

    def target_count(self) -> int:
        return _count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=_ignore_all(self.targets))


class Seq2SeqBatch(NamedTuple):
    """Pairs of source and target sequence y: `target` is BOS + y, `targets` is y + EOS, `IGNORE_INDEX` at padding."""

    source: Int64[Tensor, "b s"]
    target: Int64[Tensor, "b t"]
    targets: Int64[Tensor, "b t"]
    source_segments: Int64[Tensor, "b s"] | None = None
    target_segments: Int64[Tensor, "b t"] | None = None

    def target_count(self) -> int:
        return _count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=_ignore_all(self.targets))


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
        return _count_scored(self.targets)

    def token_count(self) -> int:
        return _count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=_ignore_all(self.targets))


class ClassificationBatch(NamedTuple):
    """A text classifier's rows, with one class index per row."""

    tokens: Int64[Tensor, "b l"]
    labels: Int64[Tensor, " b"]
    segments: Int64[Tensor, "b l"] | None = None

    def target_count(self) -> int:
        return _count_scored(self.labels)

    def token_count(self) -> int:
        return _count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(labels=_ignore_all(self.labels))


class TaggingBatch(NamedTuple):
    """A tagger's rows: the class of each word is the target of its first token, `IGNORE_INDEX` elsewhere.

    `trees` holds depth, preorder number and last descendant's preorder number of each token's node
    (`manyformer.dependency_trees`), -1 for tokens in no tree."""

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"] | None = None
    trees: Int64[Tensor, "b l 3"] | None = None

    def target_count(self) -> int:
        return _count_scored(self.targets)

    def token_count(self) -> int:
        return _count_valid(self.tokens, self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=_ignore_all(self.targets))


class ImageClassificationBatch(NamedTuple):
    """Images with channels last, and one class index per image."""

    pixels: UInt8[Tensor, "b height width channels"]
    labels: Int64[Tensor, " b"]

    def target_count(self) -> int:
        return _count_scored(self.labels)

    def token_count(self) -> int:
        return self.pixels.numel()

    def ignored(self) -> Self:
        return self._replace(labels=_ignore_all(self.labels))


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
        return _count_scored(self.targets)

    def token_count(self) -> int:
        return _count_valid(self.features[..., 0], self.segments)

    def ignored(self) -> Self:
        return self._replace(targets=_ignore_all(self.targets))


@dataclass(frozen=True, kw_only=True)
class ClippedObjective:
    """The weights of the clipped objective of proximal policy optimization (Schulman et al. 2017, equations 7 and 9).

    `clip` is epsilon, `value_weight` c_1 and `entropy_weight` c_2. With `normalize_advantages` a batch has advantages
    of mean 0 and deviation 1, unless their deviation is below 1e-3, where that would only amplify noise."""

    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantages: bool = True


class RolloutBatch(NamedTuple):
    """Rows of consecutive steps that a policy made in environments, one environment to a row.

    `segments` numbers the episodes of a row in ascending order, -1 is no step. `state` is the state of the policy
    before the first step (a tree of tensors, rows first), with which it acted. `log_probs` and `values` are those of
    the acting policy; without log_probs the objective is the plain policy gradient. A previous action of -1 is none.
    """

    observations: Shaped[Tensor, "b l *shape"]
    actions: Shaped[Tensor, "b l *a"]
    advantages: Float[Tensor, "b l"]
    returns: Float[Tensor, "b l"]
    segments: Int64[Tensor, "b l"]
    previous_actions: Shaped[Tensor, "b l *a"] | None = None
    previous_rewards: Float[Tensor, "b l"] | None = None
    log_probs: Float[Tensor, "b l"] | None = None
    values: Float[Tensor, "b l"] | None = None
    state: State = None
    objective: ClippedObjective = ClippedObjective()

    def target_count(self) -> int:
        return _count_valid(self.segments, self.segments)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(segments=torch.full_like(self.segments, PADDING_SEGMENT))


class TrajectoryBatch(NamedTuple):
    """Windows of episodes, a time step per column; a row may hold several windows, each a segment, -1 is padding.

    `returns` are the sums of rewards from each step to the end of its episode. Discrete actions are whole numbers, and
    targets that are not scored `IGNORE_INDEX`; other actions are vectors, and such targets are NaN. `timesteps` count
    from the beginning of the episode."""

    returns: Float[Tensor, "b l"]
    observations: Float[Tensor, "b l f"]
    actions: Int64[Tensor, "b l"] | Float[Tensor, "b l a"]
    targets: Int64[Tensor, "b l"] | Float[Tensor, "b l a"]
    timesteps: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"]

    def target_count(self) -> int:
        return int(count_action_targets(self.targets))

    def token_count(self) -> int:
        return _count_valid(self.timesteps, self.segments)

    def ignored(self) -> Self:
        ignored = math.nan if self.targets.is_floating_point() else IGNORE_INDEX
        return self._replace(targets=torch.full_like(self.targets, ignored))


def count_action_targets(targets: Int64[Tensor, "*b"] | Float[Tensor, "*b a"]) -> Int64[Tensor, ""]:
    """The number of discrete or continuous actions that are scored."""
    return (~targets[..., 0].isnan() if targets.is_floating_point() else targets != IGNORE_INDEX).sum()
