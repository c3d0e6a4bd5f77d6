"""Tokenizers of other libraries' models, with the token ids that these were trained with."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, SupportsIndex, final

import numpy as np
import tokenizers

from manyformer.base.errors import UserError
from manyformer.base.libraries import RefusedByLibrary, without_panics
from manyformer.base.libraries.tokenizer_rules import read_tokenizer
from manyformer.data.tokenizers.streamed_decoders import DecodingSteps
from manyformer.data.tokenizers.tokenizer import StreamDecoder, TextTokens, TokenIds, Tokenizer


class SpecialIds(NamedTuple):
    """The ids of the special tokens of a tokenizer; a kind that it does not have is given the id of the end token."""

    pad: int
    bos: int
    eos: int
    unk: int
    mask: int


class TextAffixes(NamedTuple):
    """Special tokens before and after the ids of a text, besides those that data and generation put there."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


NO_AFFIXES = TextAffixes()
_PLACEHOLDER = re.compile(r"[\[<]unused_?\d+[\]>]")
"""The names of tokens that a vocabulary keeps free, which no text has: [unused7] of BERT, <unused7> of Gemma."""


@final
class ForeignTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library as it is: no id changes, wherever its special tokens are.

    `stop_ids` are the tokens that end a text, and `prepends_bos` says whether texts begin with the start token. Ids of
    a text stand between `affixes`. A text that contains the name of a special token is encoded as text."""

    kind = "foreign"

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special: SpecialIds,
        stop_ids: Sequence[int],
        *,
        prepends_bos: bool,
        affixes: TextAffixes = NO_AFFIXES,
    ) -> None:
        # otherwise a text that contains "</s>" would be encoded as the special token
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special = special
        # ids may have gaps, and models have a row of their embedding for each id up to the largest
        self._vocab = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokens = (*special, *stop_ids, *affixes.before, *affixes.after)
        if not stop_ids or not all(0 <= token < self._vocab for token in tokens):
            raise ValueError(f"its special tokens {tokens} must be tokens, from 0 to {self._vocab - 1}")
        self.pad, self.bos, self.eos, self.unk, self.mask = special
        self.stop_ids = tuple(stop_ids)
        self._affixes = affixes
        # a model that was trained with a start token expects it before prompts too
        self.prepends_bos = self.begins_prompts = prepends_bos
        self.pair_separators = _count_separators(inner, self.eos)

    @property
    def vocab(self) -> int:
        return self._vocab

    @cached_property
    def ordinary_ids(self) -> TokenIds:
        special = {*self._special, *self.stop_ids, *self._affixes.before, *self._affixes.after, *self._special_added}
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        special.update(token for name, token in vocabulary.items() if _PLACEHOLDER.fullmatch(name))
        return np.array(sorted(set(vocabulary.values()) - special), dtype=np.int32)

    def encode_array(self, text: str) -> TokenIds:
        return self.encode_spans(text).ids

    def encode_spans(self, text: str) -> TextTokens:
        # lone surrogates have no UTF-8
        plain = text.encode("utf-8", "replace").decode()
        try:
            with without_panics():
                encoding = self._inner.encode(plain, add_special_tokens=False)
        except RefusedByLibrary as error:
            raise UserError(f"the rules of this model's tokenizer fail on the text {text!r:.60}: {error}") from None
        tokens = TextTokens.of_encoding(encoding)
        prefix, suffix = (np.array(ids, dtype=np.int32) for ids in self._affixes)
        # special tokens around a text stand for no characters: empty spans at its start and its end
        no_start = np.zeros_like(prefix)
        at_end = np.full_like(suffix, len(text))
        starts = np.concatenate([no_start, tokens.starts, at_end])
        stops = np.concatenate([no_start, tokens.stops, at_end])
        return TextTokens(np.concatenate([prefix, tokens.ids, suffix]), starts, stops)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        ids = [int(token) for token in tokens]
        if outside := [token for token in ids if not 0 <= token < self._vocab]:
            raise ValueError(f"token id {outside[0]} is out of range; this tokenizer has 0 to {self._vocab - 1}")
        with without_panics():
            text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def decoding_steps(self) -> DecodingSteps:
        """The steps of its decoder, for one text."""
        return DecodingSteps(self._decoder)

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        decoder: dict[str, Any] | None = json.loads(self._inner.to_str())["decoder"]
        return decoder

    @cached_property
    def _special_added(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    def piece(self, token: int) -> str | None:
        """The piece of a token that the decoder reads; None for a token without text."""
        if not 0 <= token < self._vocab:
            raise ValueError(f"token id {token} is out of range; this tokenizer has 0 to {self._vocab - 1}")
        if token in self._special_added:
            text: str | None = None
        else:
            text = self._inner.id_to_token(token)
        return text

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def token(self, number: SupportsIndex) -> str:
        index = int(number)
        if index in self._special or index in self.stop_ids:
            return self._inner.id_to_token(index) or ""
        return self.decode([index])

    def stream(self) -> StreamDecoder:
        return _ForeignStreamDecoder(self)

    def content(self) -> dict[str, Any]:
        return {
            "tokenizers": json.loads(self._inner.to_str()),
            "special": self._special._asdict(),
            "stop_ids": list(self.stop_ids),
            "prepends_bos": self.prepends_bos,
            "affixes": {name: list(ids) for name, ids in self._affixes._asdict().items()},
        }

    @classmethod
    @without_panics()
    def restore(cls, content: dict[str, Any]) -> "ForeignTokenizer":
        special = content["special"]
        stop_ids = content["stop_ids"]
        prepends_bos = content["prepends_bos"]
        ids = [special[name] for name in SpecialIds._fields]
        affixes = TextAffixes(*(tuple(content.get("affixes", {}).get(name, ())) for name in TextAffixes._fields))
        tokens = (*ids, *stop_ids, *affixes.before, *affixes.after)
        if not isinstance(prepends_bos, bool) or any(type(token) is not int for token in tokens):
            raise ValueError("its special tokens are no token ids")
        inner = read_tokenizer(content["tokenizers"])
        return cls(inner, SpecialIds(*ids), stop_ids, prepends_bos=prepends_bos, affixes=affixes)

    def for_sources(self) -> "ForeignTokenizer":
        """The tokenizer of texts that an encoder reads, with the tokens that its template puts around a text.

        The last of them, the end token or the language of an mBART, is its `eos`, which ends every source."""
        # what the template of the tokenizer puts around a text is seen on the shortest one
        encoding = self._inner.encode("a")
        is_special = encoding.special_tokens_mask
        if 0 in is_special:
            first = is_special.index(0)
            last = len(is_special) - is_special[::-1].index(0)
        else:
            first = 0
            last = len(is_special)
        prefix = tuple(encoding.ids[:first])
        # the last token behind a text is `eos`, which data adds itself, so it is no affix
        suffix = tuple(encoding.ids[last:]) or self.stop_ids[:1]
        special = self._special._replace(eos=suffix[-1])
        affixes = TextAffixes(prefix, suffix[:-1])
        return ForeignTokenizer(self._inner, special, self.stop_ids, prepends_bos=False, affixes=affixes)

    def for_targets(self, start: int, first: int | None = None) -> "ForeignTokenizer":
        """The tokenizer of texts that a decoder writes, which begin with the token `start`.

        `first` is what always follows it: where it is a special token, such as the language of an mBART, a target has
        it, too."""
        special = self._special._replace(bos=start)
        is_special = first is not None and first in {*self._special, *self._special_added}
        if first is not None and is_special:
            affixes = TextAffixes(before=(first,))
        else:
            affixes = NO_AFFIXES
        return ForeignTokenizer(self._inner, special, self.stop_ids, prepends_bos=self.prepends_bos, affixes=affixes)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> NoReturn:
        raise UserError("the tokenizer 'foreign' comes with a model; use char, byte, word or bpe to learn one")

    @classmethod
    @without_panics()
    def of_files(
        cls, content: Mapping[str, Any], names: Mapping[str, str], stop_ids: Sequence[int]
    ) -> "ForeignTokenizer":
        """The tokenizer with the content of a tokenizer.json.

        `names` are the special tokens by their kind ("bos", "eos", "pad", "unk", "mask"), and `stop_ids` the ids that
        end a text, those of "eos" if there are none. Raises ValueError where it has neither."""
        inner = read_tokenizer(content)
        ids = {kind: token for kind, name in names.items() if (token := inner.token_to_id(name)) is not None}
        stop_ids = list(stop_ids) or [ids[kind] for kind in ("eos", "bos") if kind in ids][:1]
        if not stop_ids:
            raise ValueError("no token ends a text: neither eos_token nor eos_token_id is given")
        # a kind that the tokenizer lacks has the id of the end token, by which `required_mask` knows it
        special = SpecialIds(*(ids.get(kind, stop_ids[0]) for kind in SpecialIds._fields))
        prepends_bos = "bos" in ids and inner.encode("a").ids[:1] == [ids["bos"]]
        return cls(inner, special, stop_ids, prepends_bos=prepends_bos)


class _ForeignStreamDecoder(StreamDecoder):
    """The text of tokens as `decode` writes it of all of them, as far as no later token can change it."""

    def __init__(self, tokenizer: ForeignTokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = tokenizer.decoding_steps()

    def push(self, token: SupportsIndex) -> str:
        piece = self._tokenizer.piece(int(token))
        if piece is None:
            return ""
        return self._steps.push(piece)

    def finish(self) -> str:
        return self._steps.finish()


def _count_separators(inner: tokenizers.Tokenizer, eos: int) -> int:
    """The number of end tokens between two texts in a tokenizer's template; 1 where it has anything else there."""
    # the template of a pair: special tokens, "a", separators, "a", special tokens
    encoding = inner.encode("a", "a")
    texts = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not texts:
        return 1
    between = range(texts[0], texts[-1])
    separators = [encoding.ids[index] for index in between if encoding.special_tokens_mask[index]]
    if separators and set(separators) == {eos}:
        return len(separators)
    return 1
