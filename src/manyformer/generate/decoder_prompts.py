"""What a decoding begins with: token ids to continue, or the sources of an encoder-decoder."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from manyformer.core import PADDING_SEGMENT
from manyformer.errors import UserError
from manyformer.generate.decoding import Decoding, SourceLengthLimit
from manyformer.generate.prompts import DEFAULT_MAX_NEW, new_token_limits, pad_left, pad_right
from manyformer.generate.protocol import GenerativeModelProtocol, TranslatesText, model_device


class SourceBatch(NamedTuple):
    """The sources of an encoder-decoder, one to a row, with segment ids (-1 for padding); None for no padding."""

    source: Shaped[Tensor, "b *source"]
    segments: Int[Tensor, "b s"] | None


class DecoderBatch(NamedTuple):
    """The first tokens of each row, padded on the left with -1, and the sources if there are any."""

    tokens: Int[Tensor, "b p"]
    source: SourceBatch | None


class DecoderPrompts(ABC):
    """The prompts or sources of one decoding."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def token_count(self) -> int:
        """The number of tokens, or entries of sources, in all prompts."""

    @abstractmethod
    def new_token_limits(self, model: GenerativeModelProtocol, decoding: Decoding) -> list[int]:
        """The most new tokens of each prompt, with the end token. Raises UserError beyond the model's limit."""

    @abstractmethod
    def batch(self, model: GenerativeModelProtocol, rows: slice, start_token: int) -> DecoderBatch:
        """The prompts of these rows on the model's device; an answer to a source begins with the `start_token`."""


@final
class TokenPrompts(DecoderPrompts):
    """Token ids: prompts of a language model, or sources of an encoder-decoder."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def token_count(self) -> int:
        return sum(map(len, self.rows))

    def new_token_limits(self, model: GenerativeModelProtocol, decoding: Decoding) -> list[int]:
        return new_token_limits(model, self.rows, decoding)

    def batch(self, model: GenerativeModelProtocol, rows: slice, start_token: int) -> DecoderBatch:
        chosen, device = self.rows[rows], model_device(model)
        if not isinstance(model, TranslatesText):
            return DecoderBatch(pad_left(chosen, device), None)
        source = pad_right(chosen, device)
        start_tokens = torch.full((len(chosen), 1), start_token, device=device)
        return DecoderBatch(start_tokens, SourceBatch(source.clamp(min=0), segments_of(source)))


@final
class SourcePrompts(DecoderPrompts):
    """Sources of an encoder-decoder as its encoder reads them, such as images, without a length that limits answers.

    Answers have at most `DEFAULT_MAX_NEW` tokens unless the decoding or the model sets another limit."""

    def __init__(self, sources: SourceBatch) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return self.sources.source.shape[0]

    @property
    def token_count(self) -> int:
        source, segments = self.sources
        return source.shape[:2].numel() if segments is None else int((segments != PADDING_SEGMENT).sum())

    def new_token_limits(self, model: GenerativeModelProtocol, decoding: Decoding) -> list[int]:
        if isinstance(decoding.max_new, SourceLengthLimit):
            raise UserError("a limit that depends on the source is for translation: give max_new as a number")
        max_length = model.max_length
        if decoding.max_new is not None and max_length is not None and decoding.max_new > max_length:
            raise UserError(f"max_new is {decoding.max_new}, but the model generates at most {max_length} tokens")
        limits = (decoding.max_new or DEFAULT_MAX_NEW, max_length)
        return [min(limit for limit in limits if limit is not None)] * len(self)

    def batch(self, model: GenerativeModelProtocol, rows: slice, start_token: int) -> DecoderBatch:
        device = model_device(model)
        source, segments = (None if part is None else part[rows].to(device) for part in self.sources)
        assert source is not None
        return DecoderBatch(torch.full((source.shape[0], 1), start_token, device=device), SourceBatch(source, segments))


def segments_of(tokens: Int[Tensor, "r t"]) -> Int[Tensor, "r t"] | None:
    """Segment ids: 0 for tokens, `PADDING_SEGMENT` for -1; None if there is no padding."""
    padding = tokens < 0
    return torch.where(padding, PADDING_SEGMENT, 0) if padding.any() else None
