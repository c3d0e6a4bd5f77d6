"""How queries, keys and values become outputs: the interface of every attention algorithm."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Out, Place, State, Watch, ignore
from manyformer.masks import Mask
from manyformer.position import Position


class Kernel(nn.Module, ABC):
    """An attention algorithm.

    `honours` names the seams of a position that it can respect; a position that touches another one is refused where
    the two meet. `folds` says that it keeps a summary of old keys in its own state instead of the keys themselves.
    `gates` numbers a token and key head are asked of the stream beside the values: their last channels. So are `asks`
    numbers a token and head beside the queries, which no position changes. `shares` says
    that the queries are to be the keys of the same tokens, with one projection for both. `by_content` says that which
    pairs are computed depends on what the tokens are like, so that only numbers tell its cost.
    """

    honours: frozenset[str]
    folds: bool = False
    gates: int = 0
    asks: int = 0
    shares: bool = False
    by_content: bool = False
    sight: Mask | None = None
    """What queries may see, for kernels that keep to a mask: keys that no later query can see may be forgotten."""

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        """Outputs (b, h, l, f) for queries at the places `at` from keys at the places `of`."""

    def start(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        return ()

    @abstractmethod
    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> str:
        """One sentence: which way this very call would be computed, and why."""
