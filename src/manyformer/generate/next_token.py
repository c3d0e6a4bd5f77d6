"""How a model is asked for the next token of every row: with a cache, or by computing everything again."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, State, tree_map
from manyformer.generate.bound import bind
from manyformer.generate.protocol import ContinuesText, TranslatesText


class LogitsFeed(ABC):
    """Gives logits, in single precision, for what comes after the first `end` columns of `tokens`.

    -1 is padding on the left. From call to call the columns only become more; the first call reads the prompt.
    """

    @abstractmethod
    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]: ...

    @abstractmethod
    def take(self, rows: Int[Tensor, " n"]) -> None:
        """Go on with these rows, in this order; a row may come several times or not at all."""

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """`take` for rows that are only exchanged among those of one source."""
        self.take(rows)

    @property
    def cache_bytes(self) -> int:
        """How many bytes are kept between calls."""
        return 0


@final
class CachedTextFeed(LogitsFeed):
    """A language model that goes on from its state; `capacity` reserves room for that many tokens."""

    def __init__(self, model: ContinuesText, batch: int, capacity: int | None) -> None:
        self.model, self.next, self.seen = model, bind(model), 0
        self.state = model.init_state(batch, capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        new = tokens[:, self.seen : end]
        if self.seen:
            logits, self.state = self.next(new, self.state, None)
        else:
            out = self.model(new.clamp(min=0), _segments(new), self.state)
            logits, self.state = out.logits, out.state
        self.seen = end
        return logits[:, -1].float()

    def take(self, rows: Int[Tensor, " n"]) -> None:
        self.state = _rows_of(self.state, rows)

    @property
    def cache_bytes(self) -> int:
        return size_of(self.state)


@final
class UncachedTextFeed(LogitsFeed):
    """A language model that reads everything again for each token."""

    def __init__(self, model: ContinuesText) -> None:
        self.model = model

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        # once the longest prompts have gone, the first columns are padding in all rows and only make them longer
        tokens = tokens[:, int((tokens >= 0).any(0).byte().argmax()) : end]
        return self.model(tokens.clamp(min=0), _segments(tokens)).logits[:, -1].float()

    def take(self, rows: Int[Tensor, " n"]) -> None:
        return


@final
class CachedPairFeed(LogitsFeed):
    """An encoder-decoder whose source is encoded once and whose decoder goes on from its state."""

    def __init__(self, model: TranslatesText, source: Int[Tensor, "b s"], capacity: int | None) -> None:
        self.next, self.seen = bind(model), 0
        self.memory = model.encode(source.clamp(min=0), _segments(source))
        self.state = model.init_state(source.shape[0], capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        logits, self.state = self.next(tokens[:, self.seen : end], self.state, self.memory)
        self.seen = end
        return logits[:, -1].float()

    def take(self, rows: Int[Tensor, " n"]) -> None:
        self.memory = _rows_of(self.memory, rows)
        self.state = _rows_of(self.state, rows)

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        self.state = _rows_of(self.state, rows)

    @property
    def cache_bytes(self) -> int:
        return size_of((self.memory, self.state))


@final
class UncachedPairFeed(LogitsFeed):
    """An encoder-decoder that encodes the source and reads the target again for each token."""

    def __init__(self, model: TranslatesText, source: Int[Tensor, "b s"]) -> None:
        self.model, self.source = model, source

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        return self.model(self.source.clamp(min=0), tokens[:, :end], _segments(self.source)).logits[:, -1].float()

    def take(self, rows: Int[Tensor, " n"]) -> None:
        self.source = self.source.index_select(0, rows)

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        return


def _segments(tokens: Int[Tensor, "r t"]) -> Int[Tensor, "r t"] | None:
    """0 for tokens and `PADDING_SEGMENT` for -1; None where there is no padding."""
    padding = tokens < 0
    return torch.where(padding, PADDING_SEGMENT, 0) if padding.any() else None


def _rows_of(state: State, rows: Int[Tensor, " n"]) -> State:
    return tree_map(lambda tensor: tensor.index_select(0, rows), state)


def size_of(state: State) -> int:
    """The bytes that a state's tensors occupy; memory that several of them share counts once."""
    storages: dict[int, int] = {}

    def visit(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tree_map(visit, state)
    return sum(storages.values())
