"""Logits of the next token of every row, with the decoding state or by recomputing all earlier tokens."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, MemorySequence, State, tree_map
from manyformer.generate.prompts import SourceBatch, segments_of
from manyformer.generate.protocol import BindsNextToken, GenerativeModelProtocol, ReadsPrompt, TranslatesText
from manyformer.models.generative_model import NextTokenFn


def bind_next_token(model: GenerativeModelProtocol) -> NextTokenFn:
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

    @abstractmethod
    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """`select_rows` for an index that exchanges rows only among those of one prompt or source."""

    def close(self) -> None:
        """Leave to later decodings what they can use, once no further token is needed."""
        return

    @property
    def cache_bytes(self) -> int:
        """The bytes of the tensors that are stored between calls."""
        return 0

    @property
    def steps(self) -> str:
        """How single tokens were decoded, where there was a choice."""
        return ""


@final
class CachedFeed(LogitsFeed):
    """Decoding with the model's state; an encoder-decoder encodes its `source` once.

    `capacity` preallocates the state for that many tokens.
    """

    def __init__(
        self, model: GenerativeModelProtocol, source: SourceBatch | None, batch: int, capacity: int | None
    ) -> None:
        self.model: Any = model
        self.decode_next = bind_next_token(model)
        self.length = 0
        self.memory = None
        if source is not None and isinstance(model, TranslatesText):
            self.memory = model.encode(*source)
        self.state = model.init_state(batch, capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        new_tokens = tokens[:, self.length : end]
        if self.length or self.memory is not None:
            logits, self.state = self.decode_next(new_tokens, self.state, self.memory)
        else:
            if isinstance(self.model, ReadsPrompt):
                read = self.model.last_logits
            else:
                read = self.model
            out = read(new_tokens.clamp(min=0), segments_of(new_tokens), self.state)
            logits = out.logits
            self.state = out.state
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
class UncachedFeed(LogitsFeed):
    """A model that recomputes all previous tokens, and the `source` of an encoder-decoder, at each step."""

    def __init__(self, model: GenerativeModelProtocol, source: SourceBatch | None) -> None:
        self.model: Any = model
        self.source = source
        self._padding: _LeftPadding | None = None

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        logits: Float[Tensor, "r t v"]
        if self.source is None:
            # read once for these rows: a GPU would have to be waited for at every token
            padding = self._padding = self._padding or _left_padding(tokens)
            tokens = tokens[:, padding.shared : end]
            if isinstance(self.model, ReadsPrompt):
                read = self.model.last_logits
            else:
                read = self.model
            segments = None
            if padding.is_ragged:
                segments = torch.where(tokens < 0, PADDING_SEGMENT, 0)
            logits = read(tokens.clamp(min=0), segments).logits
        else:
            logits = self.model(self.source.source, tokens[:, :end], self.source.segments).logits
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.source = _select_rows(self.source, rows)
        self._padding = None

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        return


class _LeftPadding(NamedTuple):
    """The first columns, which are padding in all rows, and whether there is padding after them."""

    shared: int
    is_ragged: bool


def _left_padding(tokens: Int[Tensor, "r t"]) -> _LeftPadding:
    """The padding of these rows; once those of the longest prompts are dropped, the other ones share some."""
    lengths = (tokens < 0).sum(1).tolist()
    return _LeftPadding(min(lengths), min(lengths) < max(lengths))


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
