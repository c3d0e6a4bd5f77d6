"""Tokenizers of other models keep their ids, and give texts back, whole and piece by piece."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_foreign_models import saved
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import import_model
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizer
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import load_tokenizer

TEXTS = ["the cat sat on the mat", "naïve café 猫 \N{FAMILY}", " two  spaces\n", "a <s> b </s>", "\ud800x"]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: byte pairs, where a character may be several tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return inner


def spaces_as_characters() -> tokenizers.Tokenizer:
    """Llama's kind: a space is a character of the next word, and unknown characters are bytes."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "th"):
        pieces.setdefault(piece, len(pieces))
    model = models.BPE(pieces, [("▁", "t"), ("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


KINDS = {"byte-level": byte_level, "spaces": spaces_as_characters}


def write(folder: Path, inner: tokenizers.Tokenizer, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    inner = KINDS[kind]()
    write(tmp_path, inner)
    read = read_hf_tokenizer(tmp_path)
    assert read is not None
    inner.encode_special_tokens = True
    read.save(tmp_path / "saved.json")
    for tokenizer in (read, load_tokenizer(tmp_path / "saved.json")):
        for text in TEXTS:
            encoding = inner.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)
            assert tokenizer.encode(text) == encoding.ids
            assert tokenizer.decode(encoding.ids) == inner.decode(encoding.ids)
            stream = tokenizer.stream()
            pieces = [stream.push(token) for token in encoding.ids]
            assert "".join([*pieces, stream.finish()]) == inner.decode(encoding.ids)
        assert (tokenizer.bos, tokenizer.eos) == (inner.token_to_id("<s>"), inner.token_to_id("</s>"))
        assert tokenizer.prepends_bos == (kind == "spaces")
        assert tokenizer.token(tokenizer.eos) == "</s>"
        with pytest.raises(ValueError, match="out of range"):
            tokenizer.decode([10_000])


def test_several_tokens_may_end_a_text(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.stop_ids == (1, 7)
    assert tokenizer.pad == 1


def test_an_imported_model_writes_with_it(tmp_path: Path) -> None:
    saved("llama-tied", tmp_path / "model")
    inner = byte_level()
    write(tmp_path / "model", inner)
    with pytest.raises(UserError, match="has a tokenizer of 270 tokens, but its model has 60"):
        import_model(tmp_path / "model")
    small = tokenizers.Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(("<unk>", "<s>", "</s>", "a", "b"))})
    )
    write(tmp_path / "model", small)
    model = mf.load(tmp_path / "model")
    assert isinstance(model.tokenizer, ForeignTokenizer)
    texts = mf.generate(model, "a", samples=20, max_new=3, seed=0).rows[0]
    assert all(token < 5 for hypothesis in texts for token in hypothesis.tokens)


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": {"type": "BPE"}}', '{"version": 1, "model": 3}'])
def test_what_is_no_tokenizer(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        read_hf_tokenizer(tmp_path)


def test_a_tokenizer_whose_texts_never_end(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no token ends a text"):
        read_hf_tokenizer(tmp_path)


PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "##s",
    "caf",
    "##e",
    "##é",
    "!",
    "A",
    "猫",
    "[",
    "\u2028",
]
WORDS = ["The cats!", "café CAFÉ cafe", "A 猫猫cat", "a dog [SEP]", "", "[MASK]\u200b the\tcat"]


@pytest.mark.oracle
@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_word_pieces_without_a_tokenizer_file(settings: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.prepends_bos
    reference = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), split_special_tokens=True, **settings)
    for text in WORDS:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
    assert tokenizer.decode([2, 5, 6, 7, 3]) == "the cats"


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"\xff\xfe", "no text in UTF-8"), (b"the\ncat", "lacks the special token")]
)
def test_what_is_no_vocabulary(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"vocab\.txt is damaged: .*{sentence}"):
        read_hf_tokenizer(tmp_path)
