"""`Subject`: the common interface of models under test, from this library, Hugging Face or an adapter."""

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
from manyformer.models import Model
from manyformer.tasks import Inputs

PaddingSide = Literal["left", "right"]


class SubjectOutput(NamedTuple):
    """The outputs of a model: logits (b, l, v), or (b, classes) if a row has one label."""

    logits: Float[Tensor, "b *l v"]
    state: State = None
    loss: Tensor | float = 0.0


class Subject(ABC):
    """A model under test.

    `not_promised` maps names of contracts, or of promises that contracts need, to the reasons why the model does not
    make them; such contracts are never reported as passed. `token_ids` are the tokens to draw from. `exact` allows the
    whole model to be converted to float64, so that rounding cannot hide a defect. `measured_anyway` are contracts that
    are measured even if they are not promised, because the number shows how far the model is from keeping them.
    Without `runs_every_input`, a contract in which the model raises an exception is not run instead of failed."""

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
    runs_every_input: bool = True
    source_sides: tuple[PaddingSide, ...] = ("left", "right")

    @property
    def model(self) -> Model | None:
        """The model under test if it is one of this library, whose loss, spec and one-token steps can be tested."""
        return None

    def __call__(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """One forward pass with a fixed seed, so that only what the contract changes can change the result."""
        seed_everything(self.seed)
        return self.forward(inputs, state)

    @abstractmethod
    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """The forward pass without seeding; with a state, `inputs` are the next tokens."""

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        """The initial state of these rows."""
        raise NotImplementedError

    def reorder(self, state: State, index: Sequence[int]) -> State:
        """The state of these rows, in this order."""
        return tree_map(lambda t: t.index_select(0, torch.tensor(index, device=t.device)), state)

    def session(self) -> AbstractContextManager[None]:
        """A context manager that is entered for the duration of a check."""
        return nullcontext()

    def copy_from(self, folder: str) -> Self:
        """Load a new subject from a folder that `save_to` wrote."""
        raise NotImplementedError

    def save_to(self, folder: str) -> None:
        """Save the model in the folder."""
        raise NotImplementedError


def seed_everything(seed: int) -> None:
    """Seed the random generators of torch, NumPy and Python, all of which released models use."""
    # torch.manual_seed records a stack trace for every kind of accelerator, although there is none
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    np.random.seed(seed)
    random.seed(seed)
