"""Text that is written token by token is that of all tokens: for every decoder, every script, and stop strings."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from manyformer.data.tokenizers.streamed_decoders import DecodingSteps
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.inference.generate.sampling import StopStringStream
from odd_tokenizers import KINDS, tokenizer_of_kind

SCRIPTS = [
    *(
        "日本語です",
        "🙂🙂 👩‍👩‍👧‍👦",
        "e\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS}",
        "שלום עולם",
        "مرحبا",
        "नमस्ते",
    ),
    *("can't do n't .", "a , b ! c", "  two  spaces ", "\n\t", "\N{REPLACEMENT CHARACTER}", "<0x41>", "[MASK] [SEP]"),
]
TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(SCRIPTS), st.text("ab 日🙂é.,'", max_size=20))

PIECES = [
    *("a", "##b", "▁a", "▁▁", "▁", "a</w>", "b</w>", "|", "<pad>", ".", "'", "n't", "Ġa", "Ċ", "é", "日", " ", "a a"),
    *("<0xE6>", "<0x97>", "<0xA5>", "<0x41>", "<0xFF>", "<0xef>", "<0xBF>", "<0xBD>", "<0x4>", "<0xZZ>", "ðŁĻĤ", "æĹ"),
    *("Ã", "©", "�", "\n"),
]
DECODERS: dict[str, Any] = {
    "none": None,
    "byte-level": decoders.ByteLevel(),
    "word-piece": decoders.WordPiece(),
    "word-piece-raw": decoders.WordPiece(cleanup=False),
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "ends-of-words": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "byte-fallback": decoders.ByteFallback(),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "bytes-then-spaces": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "strip-pieces": decoders.Strip("a", 1, 1),
    "strip-two": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "replace-pairs": decoders.Sequence([decoders.Fuse(), decoders.Replace("a▁", "-")]),
    "replace-pieces": decoders.Replace("a", ""),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), decoders.Replace("▁", " ")]
    ),
}


@pytest.mark.parametrize("name", DECODERS)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
@settings(max_examples=150, deadline=None)
@example([])
@example(["<0xE6>", "<0x97>", "<0xA5>", "<0xE6>", "<0x97>", "<0xA5>"])
@example(["<0xE6>", "<0x97>", "<0xA5>", "<0xFF>"])
@example(["<0xef>", "<0xBF>", "<0xBD>"])
def test_steps_write_what_the_library_writes_of_the_whole(name: str, pieces: list[str]) -> None:
    if "strip-pieces" in name:
        # the library itself fails for a piece that is stripped away from both ends
        pieces = [piece for piece in pieces if len(piece.strip("a")) > 0]
    decoder = DECODERS[name]
    inner = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        inner.decoder = decoder
    whole = " ".join(pieces) if decoder is None else decoder.decode(pieces)
    steps = DecodingSteps(json.loads(inner.to_str())["decoder"])
    written = ""
    for piece in pieces:
        written += steps.push(piece)
        assert whole.startswith(written)
    assert written + steps.finish() == whole


TOKENIZERS = {kind: tokenizer_of_kind(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(TEXTS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_tokens_are_written_as_the_whole_is(kind: str, text: str, data: Any) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text)
    # also what no text has: halves of characters, and special tokens in the middle
    drawn = data.draw(st.lists(st.integers(0, tokenizer.vocab - 1), max_size=6))
    tokens = [*tokens[: len(tokens) // 2], *drawn, *tokens[len(tokens) // 2 :]]
    stream, whole, written = tokenizer.stream(), tokenizer.decode(tokens), ""
    for token in tokens:
        written += stream.push(token)
        assert whole.startswith(written)
    assert written + stream.finish() == whole


def text_before(whole: str, stops: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, the longest of those that are complete together."""
    for end in range(1, len(whole) + 1):
        if found := [stop for stop in stops if whole[:end].endswith(stop)]:
            return whole[: end - max(map(len, found))]
    return whole


@pytest.mark.parametrize("kind", KINDS)
@given(TEXTS, st.data())
@settings(max_examples=60, deadline=None)
def test_stop_strings_of_the_stream_are_those_of_the_whole(kind: str, text: str, data: Any) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text + text)
    whole = tokenizer.decode(tokens)
    places = st.tuples(st.integers(0, len(whole)), st.integers(1, 4))
    cuts = data.draw(st.lists(places, max_size=3))
    stops = (*(whole[start : start + length] for start, length in cuts if whole[start : start + length]), "日b")
    writer, shown, expected = StopStringStream(tokenizer, stops), "", text_before(whole, stops)
    for token in tokens:
        shown += writer.push(token)
        assert expected.startswith(shown)
        if writer.stopped:
            break
    shown += writer.finish()
    assert shown == writer.text == expected
    assert writer.stopped == any(stop in whole for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_not_decoded_again_with_those_before_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode("the cat sat 日本 on the mat. " * 20)
    asked: list[int] = []
    decode = type(tokenizer).decode

    def counted(self: Tokenizer, ids: Any) -> str:
        ids = list(ids)
        asked.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    stream = tokenizer.stream()
    for token in tokens:
        stream.push(token)
    assert sum(asked) <= len(tokens)


def test_a_run_of_bytes_is_written_when_it_ends() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("a日本 b")]
    assert pieces == ["", "a", *[""] * 6, "日本 ", "b"]
    assert stream.finish() == ""
