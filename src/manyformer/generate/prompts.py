"""From what people give to one batch of tokens: strings, lists of ids or tensors, of different lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.errors import UserError
from manyformer.generate.decoding import Decoding, SourceLengthLimit
from manyformer.generate.protocol import GenerativeModelProtocol, TokenizerProtocol, TranslatesText

Prompt = str | Sequence[int] | Tensor
PromptBatch = Prompt | Sequence[Prompt]

USUAL = 256
"""New tokens of a language model that nobody limited."""

PAD, BOS, EOS = 0, 1, 2
"""Padding, the start and the end of a sequence, in every tokenizer of this library."""


class SpecialTokens(NamedTuple):
    """What begins and what ends a sequence, and what must never be written."""

    begin: int | None
    ends: tuple[int, ...]
    ban: tuple[int, ...]


def specials(model: GenerativeModelProtocol, words: TokenizerProtocol | None, decoding: Decoding) -> SpecialTokens:
    """From the tokenizer where there is one; an encoder-decoder without one has this library's usual numbers."""
    usual = SpecialTokens(None, (), ())
    if words is not None:
        # a model may have more outputs than there are words, to be of a rounder size
        usual = SpecialTokens(words.bos, (words.eos,), (words.pad, words.bos, *range(words.vocab, model.vocab)))
    elif isinstance(model, TranslatesText):
        usual = SpecialTokens(BOS, (EOS,), (PAD, BOS))
    ends = usual.ends if decoding.stop_ids is None else decoding.stop_ids
    return SpecialTokens(usual.begin, ends, usual.ban if decoding.ban is None else decoding.ban)


def read_prompts(
    prompts: PromptBatch, words: TokenizerProtocol | None, *, source: bool, begin: bool = False
) -> list[list[int]]:
    """One list of ids a prompt; a string goes through the tokenizer, a `source` gets the end token after it.

    `begin` puts the start token before a string, which an empty one gets in any case.

    Raises UserError for a string without a tokenizer, an empty prompt, and what is no prompt at all.
    """
    several: Sequence[object] | Tensor = [prompts] if _is_one(prompts) else prompts
    if len(several) == 0:
        raise UserError("there is no prompt: give at least one")
    rows = [_read(number, prompt, words, source=source, begin=begin) for number, prompt in enumerate(several)]
    for number, row in enumerate(rows):
        if not row:
            raise UserError(f"prompt {number} is empty: it must have at least one token")
    return rows


def _is_one(prompts: PromptBatch) -> bool:
    if isinstance(prompts, Tensor):
        return prompts.ndim == 1
    return isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(token, int) for token in prompts))


def _read(number: int, prompt: object, words: TokenizerProtocol | None, *, source: bool, begin: bool) -> list[int]:
    if isinstance(prompt, str):
        if words is None:
            raise UserError(f"prompt {number} is a string, which needs a tokenizer: give tokenizer=, or token ids")
        ids = list(words.encode(prompt))
        if source:
            return [*ids, words.eos]
        return ids if ids and not begin else [words.bos, *ids]
    if isinstance(prompt, Tensor) and prompt.ndim == 1 and not prompt.is_floating_point():
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    what = f"a tensor of shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else f"a {type(prompt).__name__}"
    raise UserError(f"prompt {number} is {what}: give a string, a list of token ids or a tensor of one row of them")


def check_tokens(rows: list[list[int]], vocab: int) -> None:
    """Raise UserError where a token is not one of the model's."""
    for number, row in enumerate(rows):
        if wrong := [token for token in row if not 0 <= token < vocab]:
            raise UserError(f"prompt {number} has token {wrong[0]}, but the model's tokens are 0 to {vocab - 1}")


def new_token_limits(model: GenerativeModelProtocol, rows: list[list[int]], decoding: Decoding) -> list[int]:
    """How many new tokens each row may get, the end token included. Raises UserError where there is no room."""
    if isinstance(model, TranslatesText):
        return [_target_limit(number, len(row), model.max_length, decoding) for number, row in enumerate(rows)]
    if isinstance(decoding.max_new, SourceLengthLimit):
        raise UserError("a limit that depends on the source is for translation: give max_new as a number")
    return [_text_limit(number, len(row), model.max_length, decoding.max_new) for number, row in enumerate(rows)]


def _text_limit(number: int, length: int, max_length: int | None, wanted: int | None) -> int:
    if max_length is None:
        return USUAL if wanted is None else wanted
    room = max_length - length
    if room < 1:
        raise UserError(
            f"prompt {number} has {length} tokens, and the model allows {max_length} in all: shorten it to {max_length - 1}"
        )
    if wanted is not None and wanted > room:
        raise UserError(
            f"prompt {number} has {length} tokens and max_new is {wanted}, but the model allows {max_length} in all: "
            f"ask for at most {room}"
        )
    return min(USUAL, room) if wanted is None else wanted


def _target_limit(number: int, length: int, max_length: int | None, decoding: Decoding) -> int:
    if max_length is not None and length > max_length:
        raise UserError(f"source {number} has {length} tokens, but the model allows at most {max_length}")
    wanted = SourceLengthLimit() if decoding.max_new is None else decoding.max_new
    if isinstance(wanted, SourceLengthLimit):
        return min(length + wanted.extra, length + wanted.extra if max_length is None else max_length)
    if max_length is not None and wanted > max_length:
        raise UserError(f"max_new is {wanted}, but the model writes at most {max_length} tokens")
    return wanted


def left_padded(rows: list[list[int]], device: torch.device) -> Int[Tensor, "b p"]:
    """The rows one below the other, their ends aligned, -1 before them."""
    width = max(map(len, rows))
    return torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)


def right_padded(rows: list[list[int]], device: torch.device) -> Int[Tensor, "b s"]:
    """The rows one below the other, their beginnings aligned, -1 after them."""
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
