"""Words and answers are the characters of their text: offsets of tokens, words of a sentence, spans of a document."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import TreesData
from manyformer.data import open_data
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.text.open_trees import unlabelled_sentences
from manyformer.data.text.treebank import NO_WORD, TreebankSentence, WordsInText, open_treebank, tokens_in_text
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models.scores import answer_exact_match
from manyformer.models.tasks.answer_spans import best_answers
from manyformer.nn.batches import IGNORE_INDEX, TaggingBatch
from manyformer.nn.batches.two_texts import DocumentEncoder, frame_question, tokens_of_answer
from odd_tokenizers import FOREIGN, KINDS, byte_level, tokenizer_of_kind

TOKENIZERS = {kind: tokenizer_of_kind(kind) for kind in KINDS}
QUESTIONS = [
    ("It is a state-of-the-art model of 2019.", "state-of-the-art"),
    ("They met in the Café Élysée near Zürich.", "Café Élysée"),
    # the same with accents as characters of their own
    (
        "They met in the Cafe\N{COMBINING ACUTE ACCENT} near Zu\N{COMBINING DIAERESIS}rich.",
        "Cafe\N{COMBINING ACUTE ACCENT}",
    ),
    ("It cost $3.50 per item in 2001.", "$3.50"),
    ("The work of O'Neill & Sons was sold.", "O'Neill & Sons"),
    ("Written  by Ada\n Lovelace in London.", "Ada\n Lovelace"),
    ("彼は 東京 に住んでいます。", "東京"),
    ("She said שלום and left 🙂🙂 early", "שלום"),
    ("It means 未知の漢字 here", "未知の漢字"),
]


@pytest.mark.parametrize("kind", KINDS)
@given(st.one_of(st.text(max_size=20), st.text("ab É日🙂 .'", max_size=30)))
@settings(max_examples=60, deadline=None)
def test_every_token_says_which_characters_it_stands_for(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode_spans(text)
    assert tokens.ids.tolist() == tokenizer.encode(text)
    assert (tokens.starts <= tokens.stops).all()
    assert (tokens.stops <= len(text)).all()
    assert tokens.starts.tolist() == sorted(tokens.starts.tolist())
    if kind in ("char", "byte", "bpe", "byte-level"):
        covered = {index for start, stop in zip(tokens.starts, tokens.stops) for index in range(start, stop)}
        assert covered == set(range(len(text)))


def logits_of(tokens: int, first: int, last: int) -> torch.Tensor:
    """Those of a model that is sure of an answer."""
    logits = torch.full((tokens, 2), -20.0)
    logits[first, 0] = logits[last, 1] = 20
    return logits


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"word"}))
@pytest.mark.parametrize(("document", "answer"), QUESTIONS)
def test_a_perfect_model_answers_with_the_characters_of_the_document(kind: str, document: str, answer: str) -> None:
    encode = DocumentEncoder(TOKENIZERS[kind])
    framed = frame_question("what is it?", document, encode, 400)
    start = document.index(answer)
    touched = tokens_of_answer(encode(document), start, start + len(answer))
    assert touched is not None
    logits = logits_of(len(framed.tokens), *(framed.start + token for token in touched))
    best = best_answers(logits, framed, document, 1)[0].label
    assert best == answer
    assert answer_exact_match([best], [answer]).value == 100.0


def test_no_answer_is_white_space_alone() -> None:
    document = "a  b"
    framed = frame_question("?", document, DocumentEncoder(TOKENIZERS["char"]), 99)
    logits = logits_of(len(framed.tokens), framed.start + 1, framed.start + 2)
    labels = [answer.label for answer in best_answers(logits, framed, document, 5)]
    assert all(label.strip() for label in labels)
    assert set(labels) <= {"(no answer)", "a", "b", "a  b"}


def running_byte_level(*, add_prefix_space: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_str(json.dumps(byte_level().content()["tokenizers"]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    inner.decoder, inner.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    return inner


FORMS = ["The", "cat", "chased", "green", "birds"]
SPACES = [True, True, True, True, False]


def test_words_are_those_of_running_text_as_transformers_has_them() -> None:
    words = WordsInText.of_forms(FORMS, SPACES)
    tokens = tokens_in_text(words, byte_level())
    inner = running_byte_level(add_prefix_space=False)
    assert tokens.ids.tolist() == inner.encode(" ".join(FORMS)).ids
    assert not tokens.is_divided
    theirs = PreTrainedTokenizerFast(tokenizer_object=running_byte_level(add_prefix_space=True))
    encoding = theirs(FORMS, is_split_into_words=True)
    # the same words but the first, before which a text has no space
    ours = [[int(token) for token in tokens.ids[tokens.word_numbers == word]] for word in range(1, 5)]
    assert ours == [
        [t for t, w in zip(encoding["input_ids"], encoding.word_ids()) if w == word] for word in range(1, 5)
    ]


@pytest.mark.parametrize("kind", FOREIGN)
@given(st.lists(st.tuples(st.text("abcs.'日É", min_size=1, max_size=5), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_every_token_belongs_to_one_word_and_every_word_has_one(kind: str, drawn: list[tuple[str, bool]]) -> None:
    tokenizer = TOKENIZERS[kind]
    forms, spaces = [form for form, _ in drawn], [space for _, space in drawn]
    words = WordsInText.of_forms(forms, spaces)
    assert [words.text[start:stop] for start, stop in zip(words.starts, words.stops)] == forms
    tokens = tokens_in_text(words, tokenizer)
    numbers = [word for word in tokens.word_numbers.tolist() if word != NO_WORD]
    assert numbers == sorted(numbers)
    assert tokens.word_numbers[tokens.first].tolist() == list(range(len(forms)))
    assert all(word not in tokens.word_numbers[:first] for word, first in enumerate(tokens.first))
    if not tokens.is_divided:
        assert [t for t in tokens.ids.tolist() if t != tokenizer.unk] == [
            t for t in tokenizer.encode(words.text) if t != tokenizer.unk
        ]


TREEBANK = """# text = She doesn't read "du vin".
1\tShe\t_\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tdoesn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdoes\t_\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\t_\tPART\t_\t_\t4\tadvmod\t_\t_
4\tread\t_\tVERB\t_\t_\t0\troot\t_\t_
5\t"\t_\tPUNCT\t_\t_\t8\tpunct\t_\tGloss=x|SpaceAfter=No
6-7\tdu\t_\t_\t_\t_\t_\t_\t_\t_
6\tde\t_\tADP\t_\t_\t8\tcase\t_\t_
7\tle\t_\tDET\t_\t_\t8\tdet\t_\t_
8\tvin\t_\tNOUN\t_\t_\t4\tobj\t_\tSpaceAfter=No
9\t"\t_\tPUNCT\t_\t_\t8\tpunct\t_\tSpaceAfter=No
10\t.\t_\tPUNCT\t_\t_\t4\tpunct\t_\tSpaceAfter=No

"""


def test_spaces_are_where_the_treebank_has_them(tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(TREEBANK)
    (row,) = open_treebank(str(tmp_path / "t.conllu"), "upos", tmp_path).rows()
    # the words of "du" are not its letters, so that they stand as words do
    assert TreebankSentence.from_row(row).in_text.text == """She doesn't read "de le vin"."""


def tagged(tokenizer: Tokenizer, folder: Path) -> tuple[TreesData, TokenizerPair]:
    run = folder / "run"
    run.mkdir(parents=True)
    TokenizerPair(tokenizer, tokenizer).save(run)
    write_manifest(run)
    (folder / "t.conllu").write_text(TREEBANK * 12)
    path = str(folder / "t.conllu")
    section = TreesData(path=path, valid=path, label="upos", tokenizer_of=str(run))
    return section, TokenizerPair(tokenizer, tokenizer, ("ADP", "AUX", "DET", "NOUN", "PART", "PRON", "PUNCT", "VERB"))


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_borrowed_tokenizer_reads_the_sentence_and_each_word_has_its_label(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    section, _ = tagged(tokenizer, tmp_path)
    data = open_data(section, "tagged", batch_tokens=96, cache=tmp_path / "cache", seed=0)
    batch: Any = next(iter(data.valid))
    assert isinstance(batch, TaggingBatch)
    text = """She doesn't read "de le vin"."""
    lines = [line for line in data.describe() if "encoded in parts" in line]
    tokens = batch.tokens[0].tolist()
    if lines:
        assert lines == [
            "24 sentences encoded in parts, because their tokens would join words, which have a label each"
        ]
    else:
        assert tokens == [tokenizer.bos, *tokenizer.encode(text), tokenizer.eos]
    assert data.labels is not None
    labels = [data.labels[label] for label in batch.targets[0].tolist() if label != IGNORE_INDEX]
    assert labels == ["PRON", "AUX", "PART", "VERB", "PUNCT", "ADP", "DET", "NOUN", "PUNCT", "PUNCT"]


def test_what_is_tagged_is_called_by_its_text(tmp_path: Path) -> None:
    section, pair = tagged(TOKENIZERS["byte-level"], tmp_path)
    data = unlabelled_sentences(section, pair, section.path, OpenRequest(96, tmp_path / "scratch"))  # type: ignore[arg-type]
    (first, *_) = data.inputs
    assert first.name == """She doesn't read "de le vin"."""
    assert first.words == ("She", "does", "n't", "read", '"', "de", "le", "vin", '"', ".")


def test_a_tokenizer_of_the_treebank_reads_its_words(tmp_path: Path) -> None:
    section, _ = tagged(TOKENIZERS["char"], tmp_path)
    own = TreesData(path=section.path, valid=section.path, label="upos", tokenizer="char")
    data = open_data(own, "tagged", batch_tokens=96, cache=tmp_path / "cache", seed=0)
    text = data.source.decode(next(iter(data.valid)).tokens[0].tolist())  # type: ignore[union-attr]
    assert text == "".join(["She", "does", "n't", "read", '"', "de", "le", "vin", '"', "."])
    assert not data.source.reads_spaces


def test_a_tokenizer_knows_whether_it_was_learned_from_words() -> None:
    reads = {kind: tokenizer.reads_spaces for kind, tokenizer in TOKENIZERS.items()}
    assert reads == dict(zip(KINDS, itertools.repeat(True))) | {"word": False}
