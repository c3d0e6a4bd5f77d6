"""Treebanks: what a batch holds of a sentence, what is refused in which words, and real ones."""

import gzip
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from manyformer.base.errors import UserError
from manyformer.config import TreesData
from manyformer.data import OpenedData, load_tokenizers, open_data
from manyformer.data.pipeline.kind import OpenRequest, kind_of
from manyformer.data.text.treebank import TreebankSentence, open_treebank
from manyformer.nn.batches import IGNORE_INDEX, TaggingBatch
from real_data import shared_data

BOOKS = """# sent_id = s-1
# text = She doesn't read old books
1\tShe\tshe\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2-3\tdoesn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdoes\tdo\tAUX\tVBZ\t_\t4\taux:pass\t_\t_
3\tn't\tnot\tPART\tRB\tPolarity=Neg\t4\tadvmod\t_\t_
4\tread\tread\tVERB\tVB\t_\t0\troot\t_\t_
5\told\told\tADJ\tJJ\t_\t6\tamod\t_\t_
5.1\tgone\t_\t_\t_\t_\t_\t_\t_\t_
6\tbooks\tbook\tNOUN\tNNS\t_\t4\tobj\t_\t_
"""
WORDS = ["She", "does", "n't", "read", "old", "books"]
PLACES = [[1, 1, 1], [1, 2, 2], [1, 3, 3], [0, 0, 5], [2, 5, 5], [1, 4, 5]]
OUTSIDE = [-1, -1, -1]


def opened(text: str, folder: Path, batch_tokens: int = 8, **more: Any) -> OpenedData:
    path = folder / "trees.conllu"
    path.write_text(text)
    given = {"path": str(path), "valid": str(path), **more}
    return open_data(TreesData(**given), "tagged", batch_tokens=batch_tokens, cache=folder / "cache", seed=0)


def first(data: OpenedData) -> TaggingBatch:
    batch = next(iter(data.valid))
    assert isinstance(batch, TaggingBatch)
    assert batch.trees is not None
    return batch


def test_a_sentence_of_words(tmp_path: Path) -> None:
    # twice, because a word that occurs once is not in the vocabulary
    data = opened(f"{BOOKS}\n{BOOKS}", tmp_path)
    batch = first(data)
    assert data.labels == ("advmod", "amod", "aux", "nsubj", "obj", "root")
    assert data.required_keywords == {"vocab": 5 + 6, "classes": 6}
    assert [data.source.token(token) for token in batch.tokens[0]] == ["<bos>", *WORDS, "<eos>"]
    assert batch.targets[0].tolist() == [IGNORE_INDEX, 3, 2, 0, 5, 1, 4, IGNORE_INDEX]
    assert batch.trees is not None
    assert batch.trees[0].tolist() == [OUTSIDE, *PLACES, OUTSIDE]


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("deprel", ["nsubj", "aux:pass", "advmod", "root", "amod", "obj"]),
        ("upos", ["PRON", "AUX", "PART", "VERB", "ADJ", "NOUN"]),
        ("xpos", ["PRP", "VBZ", "RB", "VB", "JJ", "NNS"]),
    ],
)
def test_labels(label: Any, names: list[str], tmp_path: Path) -> None:
    data = opened(BOOKS, tmp_path, label=label)
    assert data.labels == tuple(sorted(names))
    assert [data.labels[number] for number in first(data).targets[0, 1:-1]] == names
    assert load_tokenizers(tmp_path / "cache").labels == data.labels


def test_pieces_have_the_place_of_their_word_and_the_first_has_its_label(tmp_path: Path) -> None:
    data = opened(BOOKS, tmp_path, 24, tokenizer="char", label="xpos")
    batch, column = first(data), 1
    assert batch.trees is not None
    assert data.labels is not None
    for word, place, tag in zip(WORDS, PLACES, ["PRP", "VBZ", "RB", "VB", "JJ", "NNS"], strict=True):
        pieces = slice(column, column + len(word))
        assert data.source.decode(batch.tokens[0, pieces].tolist()) == word
        assert batch.trees[0, pieces].tolist() == [place] * len(word)
        assert data.labels[batch.targets[0, column]] == tag
        assert (batch.targets[0, pieces][1:] == IGNORE_INDEX).all()
        column += len(word)
    assert batch.trees[0, [0, column]].tolist() == [OUTSIDE] * 2


def test_sentences_of_a_batch_are_padded(tmp_path: Path) -> None:
    short = "1\tRead\t_\tVERB\t_\t_\t0\troot\t_\t_\n2\tbooks\t_\tNOUN\t_\t_\t1\tobj\t_\t_\n"
    (tmp_path / "valid.conllu").write_text(f"{BOOKS}\n{short}")
    batch = first(opened(f"{BOOKS}\n{BOOKS}", tmp_path, 16, valid=str(tmp_path / "valid.conllu")))
    assert batch.trees is not None
    assert batch.tokens.shape == (2, 8)
    row = int((batch.tokens[:, 4] == 0).nonzero())
    assert batch.segments is not None
    assert batch.segments[row].tolist() == [0] * 4 + [-1] * 4
    assert batch.targets[row, 3:].tolist() == [IGNORE_INDEX] * 5
    assert batch.trees[row].tolist() == [OUTSIDE, [0, 0, 1], [1, 1, 1], *[OUTSIDE] * 5]


def test_words_seen_once_stand_for_unknown_ones_unless_the_size_says_less(tmp_path: Path) -> None:
    again = BOOKS.replace("books", "papers").replace("She", "They")
    data = opened(f"{BOOKS}\n{again}", tmp_path)
    assert data.source.vocab == 5 + 4
    assert data.source.encode("read They books") == [data.source.encode("read")[0], 3, 3]
    assert data.source.decode(data.source.encode("read old does")) == "read old does"
    least = opened(f"{BOOKS}\n{again}", tmp_path, vocab=5)
    assert set(first(least).tokens[0].tolist()) == {1, 2, 3}


def test_long_sentences_are_left_out_of_training_alone(tmp_path: Path) -> None:
    short = "1\tRead\t_\tVERB\t_\t_\t0\troot\t_\t_\n2\tbooks\t_\tNOUN\t_\t_\t1\tobj\t_\t_\n"
    data = opened(f"{BOOKS}\n{short}\n{short}", tmp_path, 8, max_length=4)
    assert any("1 of " in line and "left out at 4 tokens (data.max_length)" in line for line in data.describe())
    assert next(data.train).tokens.shape == (2, 4)
    assert sum(len(batch.tokens) for batch in data.valid) == 3


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("\t4\tnsubj", "\t7\tnsubj", r"\.conllu:1 \(sentence s-1\): word 1 has the head 7, which does not exist"),
        ("\t0\troot", "\t6\troot", r"\.conllu:1 \(sentence s-1\): the heads of the words 4, 6 form a cycle"),
        ("\t6\tamod", "\t5\tamod", r"\.conllu:1 \(sentence s-1\): word 5 is its own head"),
        ("\t6\tamod", "\t_\tamod", r"\.conllu:8: word 5 has no head \(column 7\), which a tree needs \(sentence s-1"),
        ("\t6\tamod", "\tx\tamod", r"\.conllu:8: this line is not CoNLL-U \(.*'x' is not a valid value"),
        ("\t6\tamod", "\t6\t_", r"\.conllu:8: word 5 has no relation"),
        (
            "5\told\told\tADJ\tJJ\t_\t6\tamod\t_\t_",
            "5\told\told",
            r"\.conllu:8: this line has 3 columns separated by tabs",
        ),
        (
            "5\told\told\tADJ\tJJ\t_\t6\tamod\t_\t_",
            "old",
            r"\.conllu:8: this line is not CoNLL-U \(Invalid line format",
        ),
        ("\n5\told", "\n7\told", r"\.conllu:8: this word has id 7, but the next id is 5"),
        (
            "# sent_id = s-1",
            "# sent_id = s-1\n\n# lost = 1\n",
            r"\.conllu:1 \(sentence s-1\): this sentence has no words",
        ),
    ],
)
def test_mistakes_are_told_with_line_and_sentence(wrong: str, right: str, message: str, tmp_path: Path) -> None:
    assert wrong in BOOKS
    with pytest.raises(UserError, match=message):
        opened(BOOKS.replace(wrong, right), tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_length": 3}, r"no training sentence is as short as data\.max_length allows \(3 tokens\)"),
        ({"batch_tokens": 7}, r"the longest training sentence has 8 tokens, more than a batch of 7"),
        ({"batch_tokens": 9}, r"the 1 training sentences have 8 tokens, fewer than one batch of 9"),
        ({"vocab": 4}, r"vocab is 4, but a vocabulary of words holds 5 special tokens"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        opened(BOOKS, tmp_path, **given)


def test_one_label_is_nothing_to_learn(tmp_path: Path) -> None:
    one = "1\tRead\t_\tVERB\t_\t_\t0\troot\t_\t_\n"
    with pytest.raises(UserError, match="all words have the upos 'VERB'; a tagger needs at least two labels"):
        opened(one, tmp_path, 3, label="upos")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this is a folder; give a CoNLL-U file"):
        open_treebank(str(tmp_path), "upos", tmp_path)
    (tmp_path / "empty.conllu").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty\.conllu: there are no rows in it"):
        opened(BOOKS, tmp_path, test=str(tmp_path / "empty.conllu"))


def test_the_library_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "conllu", None)
    with pytest.raises(
        UserError, match=r"reading CoNLL-U needs the `conllu` library: pip install 'manyformer\[data\]'"
    ):
        opened(BOOKS, tmp_path)


def test_a_shuffled_share_is_held_out(tmp_path: Path) -> None:
    many = "\n".join(BOOKS.replace("books", f"book{number}") for number in range(200))
    data = opened(many, tmp_path, 64, valid=0.2)
    count = sum(len(batch.tokens) for batch in data.valid)
    assert 20 < count < 60
    assert f"train: {200 - count} sentences; valid: {count} sentences" in data.describe()


@pytest.mark.parametrize(
    ("name", "sentences", "words", "relations"),
    [
        ("ud_english_ewt/en_ewt-ud-dev.conllu.gz", 2001, 25_147, 36),
        ("ud_pud_en_de/de_pud-ud-test.conllu.gz", 1000, 21_332, None),
    ],
)
def test_real_treebanks(name: str, sentences: int, words: int, relations: int | None, tmp_path: Path) -> None:
    path = shared_data(*name.split("/"))
    actual = [TreebankSentence.from_row(row) for row in open_treebank(str(path), "relation", tmp_path).rows()]
    assert len(actual) == sentences
    # counted without the library: lines that begin with a whole number
    with gzip.open(path, "rt", encoding="utf-8") as file:
        numbered = [line.split("\t") for line in file if line.partition("\t")[0].isdecimal()]
    assert [word for one in actual for word in one.forms] == [cells[1] for cells in numbered]
    assert [head for one in actual for head in one.heads] == [int(cells[6]) for cells in numbered]
    assert len(numbered) == words
    for one in actual[:100]:
        assert nx.is_arborescence(nx.DiGraph((head, word) for word, head in enumerate(one.heads, 1)))
    assert relations in (None, len({label for one in actual for label in one.labels}))


@pytest.mark.parametrize("digits", ["9" * 5000, "99999999999999999999"])
def test_numbers_of_any_length_are_named_with_their_line(digits: str, tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(f"1\tA\ta\tX\tX\t_\t0\troot\t_\t_\n2\tb\tb\tX\tX\t_\t{digits}\tdet\t_\t_\n\n")
    with pytest.raises(UserError, match=r"a\.conllu:[12]"):
        list(open_treebank(str(path), "relation", tmp_path).rows())


def test_a_line_that_is_neither_word_nor_comment(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text("\t# sent_id = 1\n1\tA\ta\tX\tX\t_\t0\troot\t_\t_\n\n")
    with pytest.raises(
        UserError, match=r"a\.conllu:1 .sentence 1.: a line of this sentence is neither a word nor a comment"
    ):
        list(open_treebank(str(path), "relation", tmp_path).rows())


def test_a_word_without_a_form_is_refused(tmp_path: Path) -> None:
    text = BOOKS.replace("5\told\t", "5\t\t")
    with pytest.raises(UserError, match=r"trees\.conllu:8: word 5 has no form \(column 2\) \(sentence s-1\)"):
        opened(text, tmp_path)


@pytest.mark.parametrize(
    "line", [" 5\told\told\tADJ\tJJ\t_\t6\tamod\t_\t_", "5\told\tvery  old\tADJ\tJJ\t_\t6\tamod\t_\t_"]
)
def test_a_line_whose_columns_would_shift_is_refused(line: str, tmp_path: Path) -> None:
    text = BOOKS.replace("5\told\told\tADJ\tJJ\t_\t6\tamod\t_\t_", line)
    with pytest.raises(UserError, match=r"trees\.conllu:8: (word 5 has white space around|this line is not CoNLL-U)"):
        opened(text, tmp_path)


def chain(words: int) -> str:
    """A sentence whose words are each the head of the next."""
    return "".join(f"{n}\tw\t_\tNOUN\t_\t_\t{n - 1}\t{'obj' if n % 2 else 'root'}\t_\t_\n" for n in range(1, words + 1))


def test_an_endless_sentence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trees\.conllu:1: this sentence has 5,000 words, and at most 4,096 are read"):
        opened(chain(5000), tmp_path)
    with pytest.raises(UserError, match=r"trees\.conllu:1: the sentence that begins here has more than 16,384 lines"):
        opened(chain(20_000), tmp_path)


def test_long_sentences_to_tag_do_not_share_a_batch(tmp_path: Path) -> None:
    tokenizers = opened(f"{BOOKS}\n{BOOKS}", tmp_path, label="upos").tokenizers
    path = tmp_path / "long.conllu"
    path.write_text("\n".join([chain(2), chain(4000), chain(3000), chain(4000), chain(4000), chain(4000), chain(2)]))
    data = TreesData(path=str(path), label="upos")
    unlabelled = kind_of(data).unlabelled
    assert unlabelled is not None
    found = unlabelled(data, tokenizers, str(path), OpenRequest(64, tmp_path / "cache"))
    assert found.batches is not None
    sizes = [tuple(batch.tokens.shape) for batch in found.batches]
    assert [rows for rows, _ in sizes] == [4, 3]
    assert max(rows * width for rows, width in sizes) <= 1 << 14
