"""The protocols that generation requires of models and tokenizers: any object with these methods can be used."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from manyformer.models.static_step import StaticStepFn
from manyformer.nn.core import MemorySequence, State


@runtime_checkable
class LogitsAndState(Protocol):
    """The output of a model: `logits` (b, l, v) and the decoding state after these tokens."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def state(self) -> Any: ...


@runtime_checkable
class DecoderProtocol(Protocol):
    """The members that language models and encoder-decoders have in common."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_length(self) -> int | None: ...
    def init_state(self, batch: int, *, capacity: int | None = None) -> State: ...


@runtime_checkable
class ContinuesText(DecoderProtocol, Protocol):
    """A language model, which continues a prompt."""

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, state: State = None) -> LogitsAndState: ...


@runtime_checkable
class TranslatesText(DecoderProtocol, Protocol):
    """An encoder-decoder, which decodes a target from a source."""

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


@runtime_checkable
class BindsNextToken(Protocol):
    """A model that also offers its step for one new token, bound to its current parameters."""

    def next_token(self) -> Callable[[Tensor, State, MemorySequence | None], tuple[Tensor, State]]: ...


@runtime_checkable
class BindsStaticStep(Protocol):
    """A model that also offers a step of fixed operators and shapes, for positions below a limit."""

    def static_next_token(self, position_limit: int) -> StaticStepFn: ...


@runtime_checkable
class ReadsPrompt(Protocol):
    """A language model that also offers the logits of the last token alone."""

    def last_logits(self, tokens: Tensor, segments: Tensor | None = None, state: State = None) -> LogitsAndState: ...


GenerativeModelProtocol = ContinuesText | TranslatesText


@runtime_checkable
class TextStreamProtocol(Protocol):
    """Incremental detokenization: text from single tokens; an incomplete multi-byte character is held back."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


@runtime_checkable
class TokenizerProtocol(Protocol):
    """A tokenizer: encoding, decoding, the vocabulary size and the ids of the special tokens."""

    @property
    def vocab(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def pair_separators(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def prepends_bos(self) -> bool: ...
    @property
    def begins_prompts(self) -> bool: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def stream(self) -> TextStreamProtocol: ...
