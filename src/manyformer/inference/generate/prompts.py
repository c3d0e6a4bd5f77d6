"""Prompts given as strings, token ids or tensors, and sources of an encoder-decoder, as padded batches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.inference.generate.decoding import Decoding, SourceLengthLimit
from manyformer.inference.generate.logits_processors import ForcedTokens
from manyformer.inference.generate.protocol import GenerativeModelProtocol, TokenizerProtocol, TranslatesText
from manyformer.models.model_files import GenerationSettings
from manyformer.nn.core import PADDING_SEGMENT

Prompt = str | Sequence[int] | Tensor
PromptBatch = Prompt | Sequence[Prompt]
DEFAULT_MAX_NEW = 256
"""The most new tokens of a language model where neither the caller nor the model sets a limit."""

PAD = 0
BOS = 1
EOS = 2
"""The ids of the padding, start and end tokens in every tokenizer of this library."""


class SpecialTokens(NamedTuple):
    """The token that starts a sequence, those that end it, that are never generated, and that are always there."""

    bos: int | None
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    forced: ForcedTokens | None = None


def special_tokens(
    model: GenerativeModelProtocol, tokenizer: TokenizerProtocol | None, decoding: Decoding
) -> SpecialTokens:
    """The special tokens of the model, or of the tokenizer if it has none.

    An encoder-decoder without either uses `PAD`, `BOS` and `EOS`."""
    defaults = SpecialTokens(None, (), ())
    generation: GenerationSettings | None = getattr(model, "generation", None)
    # a model may have more outputs than the tokenizer has tokens, so that its vocabulary size is rounder
    if tokenizer is None:
        outside = set[int]()
    else:
        outside = set(range(tokenizer.vocab, model.vocab))
    # a model that came with settings of its own for generation knows better than its tokenizer
    if generation is not None:
        forced = ForcedTokens(generation.forced_first, generation.forced_last)
        banned = tuple(sorted(outside.union(generation.banned_ids)))
        defaults = SpecialTokens(generation.start, generation.stop_ids, banned, forced)
    elif tokenizer is not None:
        banned = tuple(sorted(outside.union({tokenizer.pad, tokenizer.bos}) - set(tokenizer.stop_ids)))
        defaults = SpecialTokens(tokenizer.bos, tokenizer.stop_ids, banned)
    elif isinstance(model, TranslatesText):
        defaults = SpecialTokens(BOS, (EOS,), (PAD, BOS))
    if decoding.stop_ids is None:
        stop_ids = defaults.stop_ids
    else:
        stop_ids = decoding.stop_ids
    if decoding.ban is None:
        banned = defaults.banned_ids
    else:
        banned = decoding.ban
    return defaults._replace(stop_ids=stop_ids, banned_ids=banned)


def read_prompts(
    prompts: PromptBatch, tokenizer: TokenizerProtocol | None, *, source: bool, begin: bool | None = None
) -> list[list[int]]:
    """The token ids of each prompt; strings are encoded, and a `source` string gets the end token.

    `begin` puts the start token in front of a string, if texts of this tokenizer have one; None does where its template
    does. An empty string gets it in any case.

    Raises UserError for a string without a tokenizer, an empty prompt, and any other type.
    """
    prompt_list: Sequence[object] | Tensor = [prompts] if _is_single_prompt(prompts) else prompts
    if len(prompt_list) == 0:
        raise UserError("there is no prompt: give at least one")
    rows = []
    for index, prompt in enumerate(prompt_list):
        rows.append(_encode_prompt(index, prompt, tokenizer, source=source, begin=begin))
        if not rows[-1]:
            raise UserError(f"prompt {index} is empty: it must have at least one token")
    return rows


def _is_single_prompt(prompts: PromptBatch) -> bool:
    if isinstance(prompts, Tensor):
        return prompts.ndim == 1
    # a list of whole numbers is one prompt, a list of lists several
    return isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(token, int) for token in prompts))


def _encode_prompt(
    index: int, prompt: object, tokenizer: TokenizerProtocol | None, *, source: bool, begin: bool | None
) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(f"prompt {index} is a string, which needs a tokenizer: give tokenizer=, or token ids")
        ids = list(tokenizer.encode(prompt))
        # a source is read as a whole, and its end token says where it ends
        if source:
            return [*ids, tokenizer.eos]
        if begin is None:
            begins = tokenizer.begins_prompts
        else:
            begins = begin and tokenizer.prepends_bos
        if begins or not ids:
            return [tokenizer.bos, *ids]
        return ids
    if isinstance(prompt, Tensor) and prompt.ndim == 1 and not prompt.is_floating_point():
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if isinstance(prompt, Tensor):
        kind = f"tensor of shape {tuple(prompt.shape)}"
    else:
        kind = type(prompt).__name__
    raise UserError(f"prompt {index} is a {kind}: give a string, a list of token ids or a tensor of one row of them")


def read_vocab(model: GenerativeModelProtocol) -> int:
    """The size of the vocabulary that a model reads: that of the source, which an encoder-decoder may have besides."""
    vocab: int | None = getattr(getattr(model, "embed_source", None), "vocab", None)
    if vocab is None:
        return model.vocab
    return vocab


def check_tokens(rows: list[list[int]], vocab: int) -> None:
    """Raise UserError where a token is not one of the model's."""
    for index, row in enumerate(rows):
        # on the host: an embedding on a GPU would fail with an assertion of its kernel, and the process with it
        if invalid_ids := [token for token in row if not 0 <= token < vocab]:
            raise UserError(f"prompt {index} has token {invalid_ids[0]}, but the model's tokens are 0 to {vocab - 1}")


def crop_prompts(model: GenerativeModelProtocol, rows: list[list[int]], decoding: Decoding) -> list[list[int]]:
    """The last tokens of each prompt that leave space for `max_new` tokens in the model's `max_length`.

    Without `max_new` that is 256 tokens, or half of the `max_length`. Raises UserError for a translation, whose source
    is needed as a whole, and where `max_new` leaves no token of the prompt."""
    if isinstance(model, TranslatesText) or isinstance(decoding.max_new, SourceLengthLimit):
        raise UserError("crop is for language models: a translation needs its whole source")
    if model.max_length is None:
        return rows
    if decoding.max_new is None:
        # a short context is shared evenly between the prompt and what follows it
        max_new = min(DEFAULT_MAX_NEW, model.max_length // 2)
    else:
        max_new = decoding.max_new
    capacity = model.max_length - max_new
    if capacity < 1:
        raise UserError(f"max_new is {max_new}, but the model allows {model.max_length} tokens with the prompt")
    # the end of a prompt decides how it goes on
    return [row[-capacity:] for row in rows]


def new_token_limits(model: GenerativeModelProtocol, rows: list[list[int]], decoding: Decoding) -> list[int]:
    """The most new tokens of each row, with the end token. Raises UserError beyond the model's `max_length`."""
    if isinstance(model, TranslatesText):
        return [_target_limit(index, len(row), model.max_length, decoding) for index, row in enumerate(rows)]
    if isinstance(decoding.max_new, SourceLengthLimit):
        raise UserError("a limit that depends on the source is for translation: give max_new as a number")
    return [_text_limit(index, len(row), model.max_length, decoding.max_new) for index, row in enumerate(rows)]


def _text_limit(index: int, length: int, max_length: int | None, max_new: int | None) -> int:
    if max_length is None:
        if max_new is None:
            return DEFAULT_MAX_NEW
        return max_new
    capacity = max_length - length
    if capacity < 1:
        raise UserError(
            f"prompt {index} has {length} tokens, and the model allows {max_length} in all: "
            f"shorten it to {max_length - 1}, or leave out its beginning with crop"
        )
    if max_new is not None and max_new > capacity:
        raise UserError(
            f"prompt {index} has {length} tokens and max_new is {max_new}, but the model allows {max_length} in all: "
            f"ask for at most {capacity}, or leave out its beginning with crop"
        )
    if max_new is None:
        return min(DEFAULT_MAX_NEW, capacity)
    return max_new


def _target_limit(index: int, length: int, max_length: int | None, decoding: Decoding) -> int:
    if max_length is not None and length > max_length:
        raise UserError(f"source {index} has {length} tokens, but the model allows at most {max_length}")
    max_new = SourceLengthLimit() if decoding.max_new is None else decoding.max_new
    if isinstance(max_new, SourceLengthLimit):
        if max_length is None:
            return length + max_new.extra
        return min(length + max_new.extra, max_length)
    if max_length is not None and max_new > max_length:
        raise UserError(f"max_new is {max_new}, but the model generates at most {max_length} tokens")
    return max_new


def pad_left(rows: list[list[int]], device: torch.device) -> Int[Tensor, "b p"]:
    """Stack rows of different lengths into one tensor, padded on the left with -1."""
    width = max(map(len, rows))
    return torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)


def pad_right(rows: list[list[int]], device: torch.device) -> Int[Tensor, "b s"]:
    """Stack rows of different lengths into one tensor, padded on the right with -1."""
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)


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
        chosen = self.rows[rows]
        device = model_device(model)
        if not isinstance(model, TranslatesText):
            return DecoderBatch(pad_left(chosen, device), None)
        # padding of a source is on the right, where positions of its tokens do not move; that of prompts on the left,
        # so that all rows end in the same column
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
        if segments is None:
            return source.shape[:2].numel()
        return int((segments != PADDING_SEGMENT).sum())

    def new_token_limits(self, model: GenerativeModelProtocol, decoding: Decoding) -> list[int]:
        if isinstance(decoding.max_new, SourceLengthLimit):
            raise UserError("a limit that depends on the source is for translation: give max_new as a number")
        max_length = model.max_length
        if decoding.max_new is not None and max_length is not None and decoding.max_new > max_length:
            raise UserError(f"max_new is {decoding.max_new}, but the model generates at most {max_length} tokens")
        limit = decoding.max_new or DEFAULT_MAX_NEW
        if max_length is not None:
            limit = min(limit, max_length)
        return [limit] * len(self)

    def batch(self, model: GenerativeModelProtocol, rows: slice, start_token: int) -> DecoderBatch:
        device = model_device(model)
        source = self.sources.source[rows].to(device)
        segments = self.sources.segments
        if segments is not None:
            segments = segments[rows].to(device)
        start_tokens = torch.full((len(source), 1), start_token, device=device)
        return DecoderBatch(start_tokens, SourceBatch(source, segments))


def segments_of(tokens: Int[Tensor, "r t"]) -> Int[Tensor, "r t"] | None:
    """Segment ids: 0 for tokens, `PADDING_SEGMENT` for -1; None if there is no padding."""
    padding = tokens < 0
    if padding.any():
        return torch.where(padding, PADDING_SEGMENT, 0)
    return None


def model_device(model: GenerativeModelProtocol) -> torch.device:
    """The device of the model's first parameter; the CPU for a model without parameters."""
    parameter = None
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.device
