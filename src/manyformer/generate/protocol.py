"""What generation needs of models and tokenizers, and nothing more: any object with these methods will do."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyformer.core import Memory, State


@runtime_checkable
class Predicted(Protocol):
    """What a model returns: `logits` (b, l, v), and the state to go on from."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def state(self) -> Any: ...


@runtime_checkable
class Decodes(Protocol):
    """What both kinds of models share."""

    @property
    def vocab(self) -> int: ...
    @property
    def longest(self) -> int | None: ...
    def start(self, batch: int, *, capacity: int | None = None) -> State: ...


@runtime_checkable
class Continues(Decodes, Protocol):
    """A language model: it goes on from a prompt."""

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, state: State = None) -> Predicted: ...


@runtime_checkable
class Translates(Protocol):
    """An encoder-decoder: it answers a source."""

    @property
    def vocab(self) -> int: ...
    @property
    def longest(self) -> int | None: ...
    def start(self, batch: int, *, capacity: int | None = None) -> State: ...
    def encode(self, source: Tensor, source_segments: Tensor | None = None) -> Memory: ...
    def decode(
        self, target: Tensor, memory: Memory, target_segments: Tensor | None = None, state: State = None
    ) -> Predicted: ...
    def __call__(
        self,
        source: Tensor,
        target: Tensor,
        source_segments: Tensor | None = None,
        target_segments: Tensor | None = None,
        state: State = None,
    ) -> Predicted: ...


Model = Continues | Translates


@runtime_checkable
class Letters(Protocol):
    """Text from tokens that arrive one by one; a letter whose bytes are not all there yet waits."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


@runtime_checkable
class Words(Protocol):
    """A tokenizer: text to tokens and back, how many tokens there are, and the numbers of the special ones."""

    @property
    def vocab(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def stream(self) -> Letters: ...


def device_of(model: Model) -> torch.device:
    """Where the model's parameters are; the CPU for a model without any."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device
