"""How queries, keys and values become outputs: the interface of every attention algorithm."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.masks import Mask
from manyformer.position import Position


class Kernel(nn.Module, ABC):
    """An attention algorithm.

    `supports` names the seams of a position that it can respect; a position that touches another one is refused where
    the two meet. `recurrent` says that it keeps a summary of old keys in its own state instead of the keys themselves.
    `gate_dim` numbers a token and key head are asked of the stream beside the values: their last channels. So are
    `extra_query_dim` numbers a token and head beside the queries, which no position changes. `tied_qk` says that the
    queries are to be the keys of the same tokens, with one projection for both. `content_based` says that which pairs
    are computed depends on what the tokens are like, so that only numbers tell its cost."""

    supports: frozenset[str]
    recurrent: bool = False
    gate_dim: int = 0
    extra_query_dim: int = 0
    tied_qk: bool = False
    content_based: bool = False
    cache_mask: Mask | None = None
    """What queries may see, for kernels that keep to a mask: keys that no later query can see may be forgotten."""

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """Outputs (b, h, l, f) for queries at the places `query_positions` from keys at the places `key_positions`."""

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        return ()

    @abstractmethod
    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        """One sentence: which way this very call would be computed, and why."""
