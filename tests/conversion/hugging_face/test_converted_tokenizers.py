"""Tokenizers in the files of older folders, without a tokenizer.json: the ids that these models were trained with."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizer, read_hf_tokenizers

pytestmark = pytest.mark.oracle

TEXTS = ["the cat sat on the mat", "a dog ran over the hills, and the cats sat", "Über den Hügel!"] * 8
UNSEEN = ["the cats ran", " a  mat,", "hills and Hügel!", "dogs?", ""]


def save_byte_pairs(folder: Path, special: list[str]) -> tokenizers.Tokenizer:
    """The tokenizer whose vocabulary and merges are written."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    inner.model.save(str(folder))
    return inner


def save_pieces(folder: Path, name: str, texts: list[str] = TEXTS, **options: Any) -> Any:
    """A model of sentencepiece in a file, as its own library reads it."""
    import sentencepiece

    file = folder / "texts.txt"
    file.write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(file), model_prefix=str(folder / "m"), vocab_size=60, hard_vocab_limit=False, minloglevel=2, **options
    )
    (folder / "m.model").rename(folder / name)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / name))


@pytest.mark.parametrize(
    ("model_type", "special", "prepends_bos"),
    [
        ("gpt2", ["<|endoftext|>"], False),
        ("roberta", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], True),
        ("bart", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], True),
    ],
)
def test_byte_pairs_and_merges(model_type: str, special: list[str], prepends_bos: bool, tmp_path: Path) -> None:
    inner = save_byte_pairs(tmp_path, special)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.prepends_bos is prepends_bos
    assert tokenizer.token(tokenizer.bos) == special[0]
    assert tokenizer.token(tokenizer.eos) == ("</s>" if prepends_bos else special[0])
    for text in UNSEEN:
        assert tokenizer.encode(text) == inner.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentence_pieces_of_t5(tmp_path: Path) -> None:
    reference = save_pieces(tmp_path, "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "eos_token_id": 1}))
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.pad, tokenizer.eos, tokenizer.stop_ids) == (0, 1, (1,))
    source = tokenizer.for_sources()
    assert source.eos == 1
    for text in UNSEEN:
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode("the cats ran")) == "the cats ran"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("spiece.model", b"no model", r"spiece\.model cannot be read as a tokenizer"),
        ("merges.txt", b"a b c d", "merges.txt cannot be read as a tokenizer"),
    ],
)
def test_what_is_no_tokenizer(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5" if name.endswith("model") else "gpt2"}))
    (tmp_path / "vocab.json").write_text("[")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_hf_tokenizer(tmp_path)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_byte_pairs(tmp_path, ["<|endoftext|>"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"merges\.txt .* the package transformers reads it: pip install"):
        read_hf_tokenizer(tmp_path)


TARGET_TEXTS = ["die Katze saß auf der Matte", "ein Hund lief über die Hügel, und die Katzen saßen"] * 16


def save_marian_tokenizers(folder: Path, *, is_shared: bool) -> None:
    """Two models of sentencepiece, and the ids of the pieces of both, or of each."""
    pieces: list[list[str]] = []
    for name, texts in (("source.spm", TEXTS), ("target.spm", TARGET_TEXTS)):
        model = save_pieces(folder, name, texts=texts)
        pieces.append([model.id_to_piece(number) for number in range(3, len(model))])
    vocabularies = [[*dict.fromkeys(pieces[0] + pieces[-1])]] if is_shared else pieces
    for name, listed in zip(("vocab.json", "target_vocab.json"), vocabularies):
        tokens = ["</s>", "<unk>", ">>deu<<", *listed, "<pad>"]
        (folder / name).write_text(json.dumps({token: number for number, token in enumerate(tokens)}))


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_two_languages_of_a_marian(is_shared: bool, tmp_path: Path) -> None:
    import transformers

    save_marian_tokenizers(tmp_path, is_shared=is_shared)
    settings = {"model_type": "marian", "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": not is_shared}))
    pair = read_hf_tokenizers(tmp_path)
    assert pair is not None
    source, target = pair[0].for_sources(), pair[1].for_targets(pair[1].pad)
    files = [str(tmp_path / name) for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json")]
    reference = transformers.MarianTokenizer(*files, separate_vocabs=not is_shared)
    assert (source.eos, target.bos, target.stop_ids) == (0, target.pad, (0,))
    for text in [*UNSEEN, *(["die Hügel"] if is_shared else []), ">>deu<< the mat", "the 語 cat"]:
        assert [*source.encode(text), source.eos] == reference(text).input_ids, text
    for text in ["die Hunde liefen", " ein  Hügel,", ""]:
        ids = reference(text_target=text).input_ids
        assert [*target.encode(text), target.eos] == ids, text
        assert target.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("target.spm", b"no model", r"target\.spm is no model of sentencepiece"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 2}', r"vocab\.json is damaged: it must give each piece an id"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 1}', r"vocab\.json is damaged: it lacks the special token '<pad>'"),
    ],
)
def test_what_is_no_tokenizer_of_a_marian(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    save_marian_tokenizers(tmp_path, is_shared=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_hf_tokenizers(tmp_path)


@pytest.mark.parametrize(("model_type", "name"), [("mbart", "sentencepiece.bpe.model"), ("xlnet", "spiece.model")])
def test_sentence_pieces_of_mbart_and_xlnet(model_type: str, name: str, tmp_path: Path) -> None:
    import transformers

    save_pieces(tmp_path, name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 2}))
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in UNSEEN:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference.encode(text), skip_special_tokens=True
        )
    source = tokenizer.for_sources()
    assert [*source.encode("the cat"), source.eos] == reference.encode("the cat")
