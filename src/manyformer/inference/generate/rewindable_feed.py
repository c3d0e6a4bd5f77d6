"""A model that reads several tokens of one row at a time, of which the last ones may be taken back."""

from typing import NamedTuple, final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.inference.generate.next_token import LogitsFeed, storage_bytes
from manyformer.models.embedding import ModelState, StreamTail
from manyformer.models.generative_model import LanguageModel
from manyformer.models.head import apply_head
from manyformer.nn.attention.kv_cache.kv_source import KVCache
from manyformer.nn.core import State

MAX_REREAD = 16
"""Tokens that are read again with the next ones, before they are read by themselves to be part of the state."""


class ReadTokens(NamedTuple):
    """The last hidden states of some tokens (1, n, d), and the logits of what follows them (n, v) in float32."""

    hidden: Float[Tensor, "1 n d"]
    logits: Float[Tensor, "n v"]


@final
class RewindableFeed(LogitsFeed):
    """Decoding of one row in which tokens are read on trial: `read` some, then `keep` the first ones.

    Caches of keys are cut. Any other state, such as the sums of a recurrent layer, cannot go back: then the state
    before the trial stays, and the tokens that were kept are read again at the beginning of the next call, or by
    themselves once they are more than `MAX_REREAD`. `length` tokens are in the state."""

    def __init__(self, model: LanguageModel, capacity: int) -> None:
        self.model = model
        self.length = 0
        self.state: ModelState = model.init_state(1, capacity=capacity)
        self.hidden: Float[Tensor, "1 n d"] | None = None
        self._after: ModelState | None = None
        self._count = 0

    def __call__(self, tokens: Int[Tensor, "1 t"], end: int) -> Float[Tensor, "1 v"]:
        read = self.read(tokens[:, self.length : end], 1)
        self.keep(end - self.length)
        return read.logits

    def read(self, tokens: Int[Tensor, "1 n"], last: int) -> ReadTokens:
        """Read tokens on trial; the logits are those after each of the `last` ones."""
        hidden, self._after, _ = self.model.hidden(tokens, None, self.state)
        self._count = tokens.shape[1]
        self.hidden = hidden
        logits = apply_head(self.model.head, hidden[:, -last:])
        return ReadTokens(hidden, logits[0].float())

    def keep(self, count: int) -> None:
        """Take back all tokens of the last `read` but the first `count`, as far as the state can."""
        assert self._after is not None
        state: ModelState | None = self._after
        if count < self._count:
            state = _cut_state(self.state, self._after, self._count - count)
        self._after = None
        if state is not None:
            self.state = state
            self.length += count

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} rows cannot be drafted together: they accept different numbers of tokens")

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        self.select_rows(rows)

    @property
    def cache_bytes(self) -> int:
        return storage_bytes(self.state)


def _cut_state(before: ModelState, after: ModelState, dropped: int) -> ModelState | None:
    """The state without its last `dropped` tokens, made of those before and after a call; None where it is none."""
    tail = after.tail
    if tail.contiguous_length is None:
        return None
    try:
        body = _cut(before.body, after.body, dropped)
    except _NoCacheError:
        return None
    length = tail.contiguous_length - dropped
    return ModelState(body, StreamTail(tail.position_ids, tail.segment_ids, length, length, tail.aligned))


class _NoCacheError(Exception):
    """A part of the state is no cache of single tokens."""


def _cut(before: State, after: State, dropped: int) -> State:
    """A part of the state without its last tokens. Raises _NoCacheError where the part has no tokens to take out."""
    if isinstance(after, KVCache):
        return _cut_cache(after, dropped)
    if isinstance(after, list | tuple) and type(before) is type(after) and len(before) == len(after):
        parts = [_cut(*pair, dropped) for pair in zip(before, after)]
        if hasattr(after, "_fields"):
            return type(after)(*parts)
        return type(after)(parts)
    if not isinstance(after, Tensor | dict) and not isinstance(before, Tensor | dict) and before == after:
        return after
    raise _NoCacheError


def _cut_cache(cache: KVCache, dropped: int) -> KVCache:
    length = cache.length - dropped
    if cache.capacity is not None:
        # the columns behind the length are written again
        return cache._replace(length=length)
    k, v = (field.narrow(2, 0, length) for field in (cache.k, cache.v))
    position_ids, segment_ids = (ids.narrow(1, 0, length) for ids in (cache.position_ids, cache.segment_ids))
    return cache._replace(k=k, v=v, position_ids=position_ids, segment_ids=segment_ids, length=length)
