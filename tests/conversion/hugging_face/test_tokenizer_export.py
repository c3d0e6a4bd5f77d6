"""Exported tokenizers give the same token ids and texts in `transformers`."""

import json
from pathlib import Path

import pytest
import transformers
from test_foreign_tokenizer import KINDS, TEXTS, write

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.exported_config import AUTO_CLASSES
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizer, write_tokenizer
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM

pytestmark = pytest.mark.oracle

MORE_TEXTS = [*TEXTS, "", "a <eos><mask> b", "tabs\tand\r\nlines\n\n"]


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind not in KINDS:
        return train_tokenizer(kind, ["the cat sat on the naïve mat\n\t\r<eos>"] * 3, 290 if kind == "bpe" else None)
    write(folder, KINDS[kind]())
    tokenizer = read_hf_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", *KINDS])
def test_the_same_ids_and_texts(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, tmp_path)
    for model, begins, ends in ((LanguageModel, 0, 0), (EncoderDecoder, 0, 1), (MaskedLM, 1, 1)):
        folder = tmp_path / model.__name__
        folder.mkdir()
        write_tokenizer(folder, tokenizer, AUTO_CLASSES[model], 64)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        for text in MORE_TEXTS:
            text = text.encode("utf-8", "replace").decode()
            ids = loaded(text, add_special_tokens=False).input_ids
            assert ids == tokenizer.encode(text)
            if tokenizer.unk not in ids or kind in KINDS:
                assert loaded.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
            if ends:
                assert loaded(text).input_ids == [*[tokenizer.bos] * begins, *ids, tokenizer.eos]
        pair = loaded("a", "b").input_ids
        assert pair.count(tokenizer.eos) >= 2 * ends
        for special in ("bos", "eos", "pad", "unk", "mask"):
            assert getattr(loaded, f"{special}_token_id") == getattr(tokenizer, special)
        assert loaded.model_max_length == 64


def test_one_that_the_library_cannot_express(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a tokenizer of kind word has no equal in transformers; those of char, byte"):
        write_tokenizer(tmp_path, train_tokenizer("word", ["a a"]), AUTO_CLASSES[LanguageModel], None)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_comes_back(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bpe", tmp_path)
    write_tokenizer(tmp_path, tokenizer, AUTO_CLASSES[LanguageModel], None)
    back = read_hf_tokenizer(tmp_path)
    assert back is not None
    assert back.encode("the mat <eos>") == tokenizer.encode("the mat <eos>")
    assert (back.bos, back.stop_ids, back.pad) == (1, (2,), 0)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 10**30
