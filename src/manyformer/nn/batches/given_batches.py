"""Batches as another program gives them to a module of its own: what the module is called with, and the target."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor

from manyformer.nn.batches.batch import count_scored
from manyformer.nn.model_inputs import tree_map


class GivenBatch(NamedTuple):
    """The arguments of a call, and the target of its output where the call does not get it itself.

    `is_shifted` says that the target is the input itself: each output predicts the next token. `targets` is the number
    by which the batch counts in a mean over several: its scored targets, or its rows."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    target: Tensor | None
    rows: int
    targets: int
    is_shifted: bool = False

    def target_count(self) -> int:
        return self.targets

    def token_count(self) -> int:
        return self.targets

    def ignored(self) -> Self:
        return self._replace(targets=0)

    def of_process(self, rank: int, world_size: int) -> "GivenBatch":
        """The rows of one process, every row r with r % world_size == rank; without one, a row that counts nothing."""
        start, step = (rank, world_size) if rank < self.rows else (0, self.rows)

        def rows_of(tensor: Tensor) -> Tensor:
            if tensor.ndim and len(tensor) == self.rows:
                return tensor[start::step].contiguous()
            return tensor

        arguments, keywords, target = tree_map(rows_of, (self.arguments, dict(self.keywords), self.target))
        rows = len(range(start, self.rows, step))
        share = GivenBatch(arguments, keywords, target, rows, 0, self.is_shifted)
        if rank >= self.rows:
            return share
        return share.counted()

    def counted(self) -> "GivenBatch":
        """The batch with the number of its targets."""
        labels = self.target
        is_shifted = self.is_shifted
        if labels is None:
            # the labels of Hugging Face models, which are shifted inside where there is one for each token
            labels = self.keywords.get("labels")
            is_shifted = isinstance(labels, Tensor) and labels.ndim == 2
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return self._replace(targets=self.rows)
        if is_shifted:
            labels = labels[:, 1:]
        return self._replace(targets=count_scored(labels))
