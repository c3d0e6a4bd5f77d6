"""What generation needs of models and tokenizers, and nothing more: any object with these methods will do."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyformer.core import MemorySequence, State


@runtime_checkable
class LogitsAndState(Protocol):
    """What a model returns: `logits` (b, l, v), and the state to go on from."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def state(self) -> Any: ...


@runtime_checkable
class DecoderProtocol(Protocol):
    """What both kinds of models share."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_length(self) -> int | None: ...
    def init_state(self, batch: int, *, capacity: int | None = None) -> State: ...


@runtime_checkable
class ContinuesText(DecoderProtocol, Protocol):
    """A language model: it goes on from a prompt."""

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, state: State = None) -> LogitsAndState: ...


@runtime_checkable
class TranslatesText(Protocol):
    """An encoder-decoder: it answers a source."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_length(self) -> int | None: ...
    def init_state(self, batch: int, *, capacity: int | None = None) -> State: ...
    def encode(self, source: Tensor, source_segments: Tensor | None = None) -> MemorySequence: ...
    def decode(
        self, target: Tensor, memory: MemorySequence, target_segments: Tensor | None = None, state: State = None
    ) -> LogitsAndState: ...
    def __call__(
        self,
        source: Tensor,
        target: Tensor,
        source_segments: Tensor | None = None,
        target_segments: Tensor | None = None,
        state: State = None,
    ) -> LogitsAndState: ...


GenerativeModelProtocol = ContinuesText | TranslatesText


@runtime_checkable
class TextStreamProtocol(Protocol):
    """Text from tokens that arrive one by one; a letter whose bytes are not all there yet waits."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


@runtime_checkable
class TokenizerProtocol(Protocol):
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
    def stream(self) -> TextStreamProtocol: ...


def device_of(model: GenerativeModelProtocol) -> torch.device:
    """Where the model's parameters are; the CPU for a model without any."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device
