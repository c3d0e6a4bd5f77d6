"""What a model is given beside its weights: tokens with their segments and source, and a state of an earlier call.

This module needs nothing but torch, because the checks of other people's models stand on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

State = Any
"""A tree (tuples, lists, dicts) of batch-first tensors, with plain numbers and None as further leaves.

Only the module that created a state reads its contents; others pass it on or map over its tensors with `tree_map`."""

PADDING_SEGMENT = -1
"""The segment id of padding, which no token may attend to."""


class Inputs(NamedTuple):
    """The inputs of a model: tokens, a source for an encoder-decoder, and segment ids, with -1 for padding."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"] | None = None
    source: Int[Tensor, "b s"] | None = None
    source_segments: Int[Tensor, "b s"] | None = None

    def rows(self, index: Sequence[int]) -> Inputs:
        """The inputs of these rows, in this order."""
        tokens, *optional_parts = (None if part is None else part[list(index)] for part in self)
        assert tokens is not None
        return Inputs(tokens, *optional_parts)

    def columns(self, start: int, stop: int) -> Inputs:
        """The inputs with only the columns `start` to `stop` of the tokens; the source is unchanged."""
        segments = None
        if self.segments is not None:
            segments = self.segments[:, start:stop]
        return self._replace(tokens=self.tokens[:, start:stop], segments=segments)


def tree_map(fn: Callable[..., Tensor], state: State, *other_trees: State) -> State:
    """`state` with `fn` applied to every tensor and those at its place in `other_trees`, trees of the same form.

    All other leaves stay as they are. Raises ValueError where they differ."""
    if isinstance(state, Tensor):
        return fn(state, *other_trees)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        # a named tuple takes its fields one by one
        return type(state)(*(tree_map(fn, *children) for children in zip(state, *other_trees, strict=True)))
    if isinstance(state, list | tuple):
        return type(state)(tree_map(fn, *children) for children in zip(state, *other_trees, strict=True))
    if isinstance(state, dict):
        return {name: tree_map(fn, child, *(tree[name] for tree in other_trees)) for name, child in state.items()}
    for leaf in other_trees:
        if isinstance(leaf, Tensor) or leaf != state:
            raise ValueError(f"trees must be equal but for their tensors, got {state!r} and {type(leaf).__name__}")
    return state
