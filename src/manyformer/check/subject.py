"""What a contract talks to: one face for our models, for Hugging Face's and for anybody's module."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import State, tree_map

PaddingSide = Literal["left", "right"]


class Inputs(NamedTuple):
    """What goes into a model: tokens and, for an encoder-decoder, a source; segments as everywhere (-1 is padding)."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"] | None = None
    source: Int[Tensor, "b s"] | None = None
    source_segments: Int[Tensor, "b s"] | None = None

    def rows(self, index: Sequence[int]) -> "Inputs":
        """The chosen rows, in that order."""
        tokens, *others = (None if part is None else part[list(index)] for part in self)
        assert tokens is not None
        return Inputs(tokens, *others)

    def columns(self, begin: int, end: int) -> "Inputs":
        """A stretch of the tokens; the source stays whole."""
        segments = None if self.segments is None else self.segments[:, begin:end]
        return self._replace(tokens=self.tokens[:, begin:end], segments=segments)


class SubjectOutput(NamedTuple):
    """What comes out: logits (b, l, v), or (b, classes) of a model that gives a row one label."""

    logits: Float[Tensor, "b *l v"]
    state: State = None
    loss: Tensor | float = 0.0


class Subject(ABC):
    """A model under test.

    `not_promised` says what it does not promise, and why, by the name of a contract or of what contracts need; nothing
    in it is ever reported as passed. `token_ids` are the tokens that may be drawn. `exact` allows the whole model to be
    converted to float64, so that a mistake cannot hide behind rounding. `measured_anyway` are contracts that are
    measured even where they are not promised, because the number says how far the model is from keeping them."""

    name: str
    token_ids: Int[Tensor, " n"]
    not_promised: Mapping[str, str]
    measured_anyway: frozenset[str] = frozenset()
    module: nn.Module | None = None
    max_length: int | None = None
    length_multiple: int = 1
    seed: int = 0
    takes_source: bool = False
    per_token: bool = True
    exact: bool = False
    chunked: bool = True
    source_sides: tuple[PaddingSide, ...] = ("left", "right")

    def __call__(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """One forward, with the same random numbers each time: only what the contract changes may change."""
        seed_everything(self.seed)
        return self.forward(inputs, state)

    @abstractmethod
    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """The bare forward; with a state, `inputs` is what comes next."""

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        """The state before any token of these rows."""
        raise NotImplementedError

    def reorder(self, state: State, index: Sequence[int]) -> State:
        """The state of the chosen rows."""
        return tree_map(lambda t: t.index_select(0, torch.tensor(index, device=t.device)), state)

    def session(self) -> AbstractContextManager[None]:
        """What surrounds a whole check."""
        return nullcontext()

    def copy_from(self, folder: str) -> Self:
        """A fresh subject read from what `save_to` wrote."""
        raise NotImplementedError

    def save_to(self, folder: str) -> None:
        """Write the model to the folder."""
        raise NotImplementedError


def seed_everything(seed: int) -> None:
    """Seed torch's, NumPy's and Python's generators, all of which released models draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
