"""Tokenizers whose rules make texts much longer, or whose patterns take forever, are refused when they are read."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.libraries.tokenizer_rules import MAX_GROWTH, check_rules, read_tokenizer
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizer
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.native_tokenizers import BPETokenizer
from manyformer.data.tokenizers.saved_tokenizers import load_tokenizer

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
DIGITS_FROM_THE_RIGHT = r"(?=(\d{3})+(?!\d))"


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def replace_matches(pattern: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}


def normalizer(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(rules)}}


def pre_tokenizer(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rules)}}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(piece: str, count: int, ids: int = 1) -> dict[str, Any]:
    pieces = {"text": {"Sequence": {"id": "A", "type_id": 0}}, "token": {"SpecialToken": {"id": "a", "type_id": 0}}}
    return {
        "type": "TemplateProcessing",
        "single": [pieces["text"], *[pieces[piece]] * count],
        "pair": [],
        "special_tokens": {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}},
    }


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (normalizer(*[replace("a", "aa")] * 40), r"normalizer\.normalizers\[6\] \(Replace\)"),
        (normalizer(replace("a", "b" * 65)), r"normalizer\.normalizers\[0\] \(Replace\)"),
        # a rule that replaces nothing puts its content between all characters
        (normalizer(*[replace("", "b")] * 40), r"normalizers\[6\]"),
        (normalizer(*[replace_matches("(?=a)", "bb")] * 4), r"normalizers\[3\]"),
        # the normal form of one character has 18, and each of them becomes that character again
        (normalizer(*[replace_matches(".", "\ufdfa"), {"type": "NFKC"}] * 4), r"normalizers\[3\] \(NFKC\)"),
        (normalizer(*[replace("i", "İ"), {"type": "Lowercase"}] * 40), r"Lowercase"),
        (normalizer({"type": "Prepend", "prepend": "a" * 65}), r"\(Prepend\) more than 64 characters"),
        # sequences in sequences
        (normalizer(*[normalizer(*[replace("a", "aa")] * 4)["normalizer"]] * 2), r"normalizers\[1\]\.normalizers\[2\]"),
        (pre_tokenizer(*[BYTES] * 12), r"pre_tokenizer\.pretokenizers\[7\] \(ByteLevel\)"),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 40}}, r"decoder\.decoders\[6\]"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}}, r"BPEDecoder"),
        ({"post_processor": template("text", 100)}, r"post_processor \(TemplateProcessing\)"),
        ({"post_processor": template("token", 10, ids=101)}, r"more than 1000 tokens"),
        (normalizer(*[{"type": "NFC"}] * 257), r"normalizer has 257 rules, and at most 256"),
        ({"model": {"continuing_subword_prefix": "#" * 100}}, r"model\.continuing_subword_prefix has 100 characters"),
        ({"model": {"max_input_chars_per_word": 10**9}}, r"model\.max_input_chars_per_word is 1,000,000,000"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, r"parts of length 0"),
        *[
            (pre_tokenizer(split(pattern)), r"the pattern '.* of the rule pre_tokenizer\.pretokenizers\[0\]")
            for pattern in (
                *("(a+)+$", "(a*)*b", r"(\w+\s?)*$", "(?:a{1,100}){1,100}b", "(a|a)*b", "(a|aa)+$", "(.|a)+$"),
                *("((a+)b?)+$", "(?<x>a+)+$", "(?i:a+)+$", "(?:a+){20}b", "a**b", r"(?<x>a\g<x>?)", "(" * 1000),
            )
        ],
        (normalizer(replace_matches("(a+)+$", "")), r"normalizers\[0\] repeats a part that repeats itself"),
    ],
)
def test_costly_rules_are_refused_by_their_place(content: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        check_rules(content)


@pytest.mark.parametrize(
    "content",
    [
        *[pre_tokenizer(split(pattern)) for pattern in (GPT_2, GPT_4, GPT_4O, BLOOM, DEEPSEEK, DIGITS_FROM_THE_RIGHT)],
        pre_tokenizer(split(r"(?>a+)+"), split(r"(?:a++b)+"), split(r"(?:ab|cd)+"), split(r"[](]+|\(+")),
        # Llama, T5, ALBERT, BERT
        normalizer({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        normalizer({"type": "Precompiled", "precompiled_charsmap": ""}, replace_matches(" {2,}", "▁")),
        normalizer(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "Lowercase"}),
        {"normalizer": {"type": "BertNormalizer", "lowercase": True}, "model": {"max_input_chars_per_word": 100}},
        {"decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}},
        {"post_processor": template("token", 2)},
        {"normalizer": None, "pre_tokenizer": 3, "decoder": [], "model": "BPE", "post_processor": {"type": 3}},
        {"normalizer": {"type": "Sequence", "normalizers": [None, 3, {"type": ["Replace"]}]}},
    ],
)
def test_rules_of_known_tokenizers_are_taken(content: dict[str, Any]) -> None:
    """They are read and not passed over: with one rule more that grows every text they are refused."""
    check_rules(content)
    rules = [content["normalizer"]] if content.get("normalizer") else []
    with pytest.raises(ValueError, match=r"normalizer.* can become more than 64 times as long"):
        check_rules({**content, **normalizer(*rules, *[replace("a", "aa")] * 7)})


def test_no_text_grows_more_than_is_promised() -> None:
    """The library's own results, for the longest outcome that each of some rules can have."""
    characters = ["a", " ", "é", "İ", "中", "\ufdfa", "😀"]
    for rules in (
        [replace("a", "aa")] * 6,
        [replace_matches("", "b")] * 6,
        [replace(" ", "\ufdfa"), {"type": "NFKC"}],
        [replace("a", "İ"), {"type": "Lowercase"}, replace("i", "ii")],
        [{"type": "Prepend", "prepend": "▁" * 64}, {"type": "NFKD"}],
    ):
        content = {**json.loads(tokenizers.Tokenizer(models.BPE()).to_str()), **normalizer(*rules)}
        inner = read_tokenizer(content)
        assert inner.normalizer is not None
        for character in characters:
            inherent = len(unicodedata.normalize("NFKD", character))
            text = character * 50
            grown = inner.normalizer.normalize_str(text)
            assert len(grown) <= MAX_GROWTH * inherent * len(text) + MAX_GROWTH + 64


def test_a_compiled_table_may_not_have_long_entries() -> None:
    import base64
    import struct

    def table(entry: str) -> dict[str, Any]:
        packed = struct.pack("<I", 1024) + bytes(1024) + entry.encode() + b"\0"
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(packed).decode()}

    check_rules(normalizer(table("x" * 18)))
    with pytest.raises(ValueError, match=r"normalizers\[0\] \(Precompiled\)"):
        check_rules(normalizer(table("x" * 2000)))
    with pytest.raises(ValueError, match=r"normalizers\[2\] \(Precompiled\)"):
        check_rules(normalizer(*[table("x" * 18)] * 3))


def saved_gpt_2(folder: Path, **parts: Any) -> Path:
    inner = tokenizers.Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.normalizer = normalizers.NFC()
    inner.post_processor = processors.ByteLevel()
    inner.add_special_tokens(["</s>"])
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(inner.to_str()), **parts}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def test_the_file_of_a_growing_tokenizer_is_named(tmp_path: Path) -> None:
    assert read_hf_tokenizer(saved_gpt_2(tmp_path)) is not None
    saved_gpt_2(tmp_path, **normalizer(*[replace("a", "aa")] * 40))
    with pytest.raises(DamagedFile, match=r"tokenizer\.json is no tokenizer .*normalizers\[6\] \(Replace\) a text can"):
        read_hf_tokenizer(tmp_path)


def test_saved_tokenizers_of_ours_are_bounded_too(tmp_path: Path) -> None:
    """A run that somebody else has written holds the rules of the library as they are."""
    foreign = read_hf_tokenizer(saved_gpt_2(tmp_path))
    assert foreign is not None
    for number, tokenizer in enumerate((foreign, BPETokenizer.learn(["a b"], 261))):
        file = tmp_path / f"{number}.json"
        tokenizer.save(file)
        assert load_tokenizer(file).encode("a") == tokenizer.encode("a")
        content = json.loads(file.read_text())
        content["tokenizers"].update(normalizer(*[replace("a", "aa")] * 40))
        file.write_text(json.dumps(content))
        with pytest.raises(DamagedFile, match=rf"{number}\.json is damaged: .*normalizers\[6\]"):
            load_tokenizer(file)


def test_saved_byte_pairs_are_never_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = BPETokenizer.learn(["to be or not to be"], 270)
    content = tokenizer.content()
    content["tokenizers"]["truncation"] = {
        **{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    }
    assert BPETokenizer.restore(content).encode("to be or not") == tokenizer.encode("to be or not")


def test_a_pattern_that_gives_up_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library panics then, which no `except Exception` catches."""
    monkeypatch.setattr("manyformer.base.libraries.tokenizer_rules.check_rules", lambda content: None)
    content = json.loads((saved_gpt_2(tmp_path, **pre_tokenizer(split("(a+)+$"))) / "tokenizer.json").read_text())
    tokenizer = ForeignTokenizer.of_files(content, {"eos": "</s>"}, [])
    with pytest.raises(UserError, match=r"rules of this model's tokenizer fail on the text 'a+!': .*retry-limit"):
        tokenizer.encode("a" * 40 + "!")
