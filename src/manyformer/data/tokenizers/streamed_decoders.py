"""The decoders of the `tokenizers` library token by token: their text is that of the whole, and none is taken back.

A decoder is a chain of steps over the texts of tokens. Each step is followed by a stream, which returns what no later
token can change and holds back the rest. A step that depends on the whole text holds back all of it.
"""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, final

from manyformer.base.files.json_text import json_text
from manyformer.base.libraries.tokenizer_rules import read_tokenizer
from manyformer.data.tokenizers.native_tokenizers import byte_of_character
from manyformer.data.tokenizers.tokenizer import UNKNOWN_TEXT

Decode = Callable[[list[str]], str]


class DecodingStep(ABC):
    """One step of a decoder, for one text; texts go in and come out in pieces."""

    @abstractmethod
    def push(self, piece: str) -> list[str]:
        """The pieces that this one completes."""

    def finish(self) -> list[str]:
        """The remaining pieces at the end."""
        return []


@final
class SeparateStep(DecodingStep):
    """A step that changes each piece by itself."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def push(self, piece: str) -> list[str]:
        return [self._decode([piece])]


@final
class FirstDiffersStep(DecodingStep):
    """A step that changes each piece by itself, the first one in its own way (spaces before words)."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._is_first = True

    def push(self, piece: str) -> list[str]:
        # the library knows by the position in its list that a piece is not the first one
        preceding = [] if self._is_first else [""]
        self._is_first = False
        return [self._decode([*preceding, piece])]


@final
class JoinedStep(DecodingStep):
    """Pieces with a space between two of them: what the library does where there is no decoder."""

    def __init__(self) -> None:
        self._is_first = True

    def push(self, piece: str) -> list[str]:
        separator = "" if self._is_first else " "
        self._is_first = False
        return [separator + piece]


@final
class LastDiffersStep(DecodingStep):
    """A step that changes each piece by itself, the last one in its own way (ends of words)."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._last = list[str]()

    def push(self, piece: str) -> list[str]:
        complete = self._last
        self._last = [piece]
        if complete:
            # an empty piece behind it, so that the library does not take it for the last one
            return [self._decode([*complete, ""])]
        return []

    def finish(self) -> list[str]:
        if self._last:
            return [self._decode(self._last)]
        return []


@final
class RepeatedStep(DecodingStep):
    """Leaves out what repeats the piece before it, and empty pieces (connectionist temporal classification)."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._previous: str | None = None

    def push(self, piece: str) -> list[str]:
        is_repeated = piece == self._previous
        self._previous = piece
        text = "" if is_repeated else self._decode([piece])
        if text:
            return [text]
        return []


@final
class ByteRunStep(DecodingStep):
    """Pieces such as <0xE6>, which are bytes: a run of them is text if all of it is UTF-8, and else has none.

    What a run says depends on its last byte, so it is held back until another piece ends it."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._run = list[str]()

    def push(self, piece: str) -> list[str]:
        # bytes are held back: whether they are text depends on all bytes of the run
        if _is_byte(piece):
            self._run.append(piece)
            return []
        return [*self.finish(), piece]

    def finish(self) -> list[str]:
        run = self._run
        self._run = []
        if not run:
            return []
        text = self._decode(run)
        # each byte of a run that is no text becomes a piece
        if text == UNKNOWN_TEXT * len(run):
            return list(text)
        return [text]


@final
class ByteAlphabetStep(DecodingStep):
    """Pieces in GPT-2's characters for bytes, whose UTF-8 is one text."""

    def __init__(self) -> None:
        self._values = byte_of_character()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: str) -> list[str]:
        values = [self._values.get(character) for character in piece]
        # an added token is no sequence of such characters
        if None in values:
            raw = piece.encode()
        else:
            raw = bytes(value for value in values if value is not None)
        return [self._utf8.decode(raw)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


@final
class StrippedStartStep(DecodingStep):
    """Removes at most `count` of a character at the beginning of the text."""

    def __init__(self, character: str, count: int) -> None:
        self._character = character
        self._remaining = count

    def push(self, piece: str) -> list[str]:
        # the count runs over pieces: the start of the text may come in several
        while self._remaining and piece:
            if piece[0] != self._character:
                self._remaining = 0
                break
            piece = piece[1:]
            self._remaining = self._remaining - 1
        return [piece]


@final
class PassedStep(DecodingStep):
    """Pieces that become one text, which changes nothing but what the steps behind it see."""

    def push(self, piece: str) -> list[str]:
        return [piece]


@final
class WholeStep(DecodingStep):
    """A step that may change any part of the text until it is complete; with `is_one_text` it gets one piece."""

    def __init__(self, decode: Decode, *, is_one_text: bool) -> None:
        self._is_one_text = is_one_text
        self._decode = decode
        self._pieces = list[str]()

    def push(self, piece: str) -> list[str]:
        self._pieces.append(piece)
        return []

    def finish(self) -> list[str]:
        return [self._decode(["".join(self._pieces)] if self._is_one_text else self._pieces)]


@final
class DecodingSteps:
    """The steps of a decoder one behind the other, for one text."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        # steps have a state of the text, so each text has its own
        self._steps = [make() for make in _step_makers(json_text(decoder))]

    def push(self, piece: str) -> str:
        """The text that this piece completes."""
        return "".join(_pass_on([piece], self._steps))

    def finish(self) -> str:
        """The remaining text."""
        text = []
        # what a step held back until the end still passes through the steps behind it
        for number, step in enumerate(self._steps, 1):
            text += _pass_on(step.finish(), self._steps[number:])
        return "".join(text)


def _pass_on(pieces: Sequence[str], steps: Sequence[DecodingStep]) -> list[str]:
    passed = list(pieces)
    for step in steps:
        passed = [out for piece in passed for out in step.push(piece)]
    return passed


@cache
def _step_makers(decoder_text: str) -> tuple[Callable[[], DecodingStep], ...]:
    """Functions that make the steps of the decoder with this description in JSON."""
    description = json.loads(decoder_text)
    if description is None:
        return (JoinedStep,)
    makers = []
    is_one_text = False
    for part in _parts(description):
        # behind a step that joins pieces the library sees one text, so pieces may be cut anywhere
        makers.append(_text_step_maker(part) if is_one_text else _piece_step_maker(part))
        is_one_text = is_one_text or part["type"] in ("Fuse", "ByteLevel")
    return tuple(makers)


def _parts(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a decoder in their order; a sequence may have sequences within."""
    if description["type"] != "Sequence":
        return [description]
    return [step for part in description["decoders"] for step in _parts(part)]


def _piece_step_maker(part: Mapping[str, Any]) -> Callable[[], DecodingStep]:
    """A function that makes a step for the texts of tokens."""
    decode = _decode_function(part)
    match part["type"]:
        case "Fuse":
            return PassedStep
        case "ByteLevel":
            return ByteAlphabetStep
        case "ByteFallback":
            return lambda: ByteRunStep(decode)
        case "BPEDecoder":
            return lambda: LastDiffersStep(decode)
        case "CTC":
            return lambda: RepeatedStep(decode)
        case "WordPiece" | "Metaspace":
            return lambda: FirstDiffersStep(decode)
        case "Replace" | "Strip":
            return lambda: SeparateStep(decode)
    return lambda: WholeStep(decode, is_one_text=False)


def _text_step_maker(part: Mapping[str, Any]) -> Callable[[], DecodingStep]:
    """A function that makes a step for pieces of one text, which end anywhere."""
    decode = _decode_function(part)
    match part:
        case {"type": "Fuse"}:
            return PassedStep
        # a longer pattern could lie across two pieces
        case {"type": "Replace", "pattern": {"String": pattern}} if len(pattern) == 1:
            return lambda: SeparateStep(decode)
        case {"type": "Strip", "content": character, "start": count, "stop": 0}:
            return lambda: StrippedStartStep(character, count)
    return lambda: WholeStep(decode, is_one_text=True)


def _decode_function(part: Mapping[str, Any]) -> Decode:
    """The library's own function for a step."""
    # the library makes decoders only as parts of a tokenizer; this one has an empty vocabulary
    without_text = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    decode: Decode = read_tokenizer({"version": "1.0", **without_text, "decoder": dict(part)}).decoder.decode
    return decode


def _is_byte(piece: str) -> bool:
    digits = piece[3:5]
    return len(piece) == 6 and piece == f"<0x{digits}>" and all(digit in "0123456789abcdefABCDEF" for digit in digits)
