"""Logits of the next token of every row, with the decoding state or by recomputing all earlier tokens."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, MemorySequence, State, tree_map
from manyformer.generate.protocol import BindsNextToken, ContinuesText, TranslatesText
from manyformer.models.next_token_step import NextTokenFn


def bind_next_token(model: ContinuesText | TranslatesText) -> NextTokenFn:
    """The model's own step for one new token per row; a call of the model if it offers none."""
    if isinstance(model, BindsNextToken):
        return model.next_token()

    def next_token(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        if isinstance(model, TranslatesText):
            assert memory is not None
            out = model.decode(tokens, memory, None, state)
        else:
            out = model(tokens, None, state)
        return out.logits, out.state

    return next_token


class LogitsFeed(ABC):
    """Computes float32 logits of the token that follows the first `end` columns of `tokens`.

    -1 is padding on the left. `end` increases from call to call; the first call feeds the prompt.
    """

    @abstractmethod
    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]: ...

    @abstractmethod
    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        """Select these rows, in this order; a row may be repeated or dropped."""

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """`select_rows` for an index that exchanges rows only among those of one source."""
        self.select_rows(rows)

    @property
    def cache_bytes(self) -> int:
        """The bytes of the tensors that are stored between calls."""
        return 0


@final
class CachedTextFeed(LogitsFeed):
    """A language model that decodes with its state; `capacity` preallocates the state for that many tokens."""

    def __init__(self, model: ContinuesText, batch: int, capacity: int | None) -> None:
        self.model, self.decode_next, self.length = model, bind_next_token(model), 0
        self.state = model.init_state(batch, capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        new_tokens = tokens[:, self.length : end]
        if self.length:
            logits, self.state = self.decode_next(new_tokens, self.state, None)
        else:
            out = self.model(new_tokens.clamp(min=0), _segment_ids(new_tokens), self.state)
            logits, self.state = out.logits, out.state
        self.length = end
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.state = _select_rows(self.state, rows)

    @property
    def cache_bytes(self) -> int:
        return state_bytes(self.state)


@final
class UncachedTextFeed(LogitsFeed):
    """A language model that recomputes all previous tokens at each step."""

    def __init__(self, model: ContinuesText) -> None:
        self.model = model

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        # once the rows of the longest prompts are dropped, the first columns are padding in all rows
        tokens = tokens[:, int((tokens >= 0).any(0).byte().argmax()) : end]
        return self.model(tokens.clamp(min=0), _segment_ids(tokens)).logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        return


@final
class CachedPairFeed(LogitsFeed):
    """An encoder-decoder that encodes the source once and decodes with its state."""

    def __init__(self, model: TranslatesText, source: Int[Tensor, "b s"], capacity: int | None) -> None:
        self.decode_next, self.length = bind_next_token(model), 0
        self.memory = model.encode(source.clamp(min=0), _segment_ids(source))
        self.state = model.init_state(source.shape[0], capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        logits, self.state = self.decode_next(tokens[:, self.length : end], self.state, self.memory)
        self.length = end
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.memory = _select_rows(self.memory, rows)
        self.state = _select_rows(self.state, rows)

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        self.state = _select_rows(self.state, rows)

    @property
    def cache_bytes(self) -> int:
        return state_bytes((self.memory, self.state))


@final
class UncachedPairFeed(LogitsFeed):
    """An encoder-decoder that recomputes the source and all previous target tokens at each step."""

    def __init__(self, model: TranslatesText, source: Int[Tensor, "b s"]) -> None:
        self.model, self.source = model, source

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        return self.model(self.source.clamp(min=0), tokens[:, :end], _segment_ids(self.source)).logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.source = self.source.index_select(0, rows)

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        return


def _segment_ids(tokens: Int[Tensor, "r t"]) -> Int[Tensor, "r t"] | None:
    """Segment ids: 0 for tokens, `PADDING_SEGMENT` for -1; None if there is no padding."""
    padding = tokens < 0
    return torch.where(padding, PADDING_SEGMENT, 0) if padding.any() else None


def _select_rows(state: State, rows: Int[Tensor, " n"]) -> State:
    return tree_map(lambda tensor: tensor.index_select(0, rows), state)


def state_bytes(state: State) -> int:
    """The bytes of the storages of a state's tensors; a storage that several tensors share counts once."""
    storages: dict[int, int] = {}

    def visit(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tree_map(visit, state)
    return sum(storages.values())
