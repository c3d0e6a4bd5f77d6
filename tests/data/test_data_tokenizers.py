"""Tokenizers: exact round trips, special numbers that text cannot spell, streams that never cut a character."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.data import Tokenizer, TokenizerPair, load_tokenizers
from manyformer.data.tokenizers.saved_tokenizers import load_tokenizer, train_tokenizer
from manyformer.data.tokenizers.tokenizer import NoTokenizer

TEXTS = ["zwei junge weiße männer sind im freien .", "two young , white males are outside .", "日本語 <eos> é\n"] * 20
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", TEXTS, 320)


@given(ANY_TEXT)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_text_comes_back_exactly(kind: str, bpe: Tokenizer, text: str) -> None:
    tokenizer = bpe if kind == "bpe" else train_tokenizer("byte", [])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(5 <= token < tokenizer.vocab for token in ids)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    # Nothing half-done is ever shown; a replacement character can only come from the text itself.
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(ANY_TEXT)
@settings(max_examples=100, deadline=None)
def test_characters_come_back_where_they_are_known(text: str) -> None:
    known = set("".join(TEXTS))
    tokenizer = train_tokenizer("char", TEXTS)
    assert tokenizer.vocab == 5 + len(known)
    assert tokenizer.decode(tokenizer.encode(text)) == "".join(sign if sign in known else "�" for sign in text)
    assert len(tokenizer.encode(text)) == len(text)


def test_data_without_text_has_a_tokenizer_that_refuses_it(tmp_path: Path) -> None:
    none = NoTokenizer()
    TokenizerPair(none, none).save(tmp_path)
    write_manifest(tmp_path)
    assert load_tokenizers(tmp_path).fingerprint == TokenizerPair(none, none).fingerprint
    with pytest.raises(UserError, match="this model reads no text: it was trained on data without tokens"):
        load_tokenizers(tmp_path).source.encode("a text")


def test_unknown_characters_are_unk() -> None:
    tokenizer = train_tokenizer("char", ["abc"])
    assert tokenizer.encode("cab?") == [7, 5, 6, tokenizer.unk]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_special_numbers_are_the_same_everywhere_and_no_text_spells_them(kind: str) -> None:
    tokenizer = train_tokenizer(kind, [*TEXTS, "<pad><bos><eos><unk><mask>"], 300 if kind == "bpe" else None)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.mask) == (0, 1, 2, 3, 4)
    ids = tokenizer.encode("<pad> <eos> <mask>")
    assert min(ids) >= 5
    assert tokenizer.decode([1, 0, *ids, 2]) == "<pad> <eos> <mask>"
    assert [tokenizer.token(number) for number in range(5)] == ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_saved_tokenizer_does_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(kind, TEXTS, 300 if kind == "bpe" else None)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    text = "two weiße <eos> 日本"
    assert again.kind == kind
    assert again.vocab == tokenizer.vocab
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.fingerprint == tokenizer.fingerprint
    assert json.loads((tmp_path / "tokenizer.json").read_text())["kind"] == kind


def test_byte_pairs_are_learned_and_the_same_every_time(bpe: Tokenizer) -> None:
    assert bpe.vocab == 320
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    assert train_tokenizer("bpe", TEXTS, 320).fingerprint == bpe.fingerprint
    assert [ids.tolist() for ids in bpe.encode_many(TEXTS[:3])] == [bpe.encode(text) for text in TEXTS[:3]]


def test_shared_and_separate_vocabularies_come_back(tmp_path: Path, bpe: Tokenizer) -> None:
    TokenizerPair(bpe, bpe, ("no", "yes")).save(tmp_path / "shared")
    write_manifest(tmp_path / "shared")
    shared = load_tokenizers(tmp_path / "shared")
    assert shared.source is shared.target
    assert shared.labels == ("no", "yes")
    other = train_tokenizer("char", ["ab"])
    TokenizerPair(bpe, other).save(tmp_path / "separate")
    write_manifest(tmp_path / "separate")
    separate = load_tokenizers(str(tmp_path / "separate"))
    assert (separate.source.kind, separate.target.kind, separate.labels) == ("bpe", "char", None)


def test_a_terminal_in_another_encoding_does_not_crash() -> None:
    for kind in ("char", "byte", "bpe"):
        tokenizer = train_tokenizer(kind, TEXTS, 300 if kind == "bpe" else None)
        assert tokenizer.encode("two\udce9")


def test_what_is_wrong_is_said(tmp_path: Path, bpe: Tokenizer) -> None:
    with pytest.raises(UserError, match="no tokenizer 'bpee'; did you mean bpe"):
        train_tokenizer("bpee", TEXTS, 300)
    with pytest.raises(UserError, match=r"vocab is 200, but .* at least 261"):
        train_tokenizer("bpe", TEXTS, 200)
    with pytest.raises(UserError, match=r"nowhere\.json is missing"):
        load_tokenizer(tmp_path / "nowhere.json")
    bpe.save(tmp_path / "cut.json")
    (tmp_path / "cut.json").write_text((tmp_path / "cut.json").read_text()[:500])
    with pytest.raises(UserError, match=r"cut\.json is damaged: it is not a tokenizer"):
        load_tokenizer(tmp_path / "cut.json")
    with pytest.raises(ValueError, match="token id 320 is out of range; this bpe tokenizer has 0 to 319"):
        bpe.decode([320])
