"""Tables as other people write them: headers, quoted line ends, columns in any order, uneven rows, summaries."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.config import LabelsData, PairsData, TextData
from manyformer.data import OpenedData, open_data, survey_data
from manyformer.data.pipeline.kind import OpenRequest, kind_of
from manyformer.data.pipeline.summary import TableFindings
from manyformer.data.text import table_files as csv_records
from manyformer.data.text.pair_tables import RowTable, open_table
from manyformer.data.text.table_files import read_rows

WORDS = ("red cat", "blue dog", "old red fox", "the quick brown dog")
TEXTS = [f"{WORDS[number % 4]} {number}" for number in range(40)]
LABELS = [("pos", "neg", "none")[number % 3] for number in range(40)]
ROLES = ("text", "label")


def table(folder: Path, first: str, rows: list[tuple[str, ...]], name: str = "a.tsv", **more: Any) -> RowTable:
    """The table of a file with this first line and these rows, opened without settings of columns."""
    separator = "," if name.endswith(".csv") else "\t"
    lines = [first] * bool(first) + [separator.join(row) for row in rows]
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return open_table(str(folder / name), (None, None), ROLES, folder, **more)


def cells(opened: RowTable) -> list[tuple[str, ...]]:
    return [row.cells for row in opened.rows()]


ROWS = list(zip(TEXTS, LABELS))


@pytest.mark.parametrize("first", ["text\tlabel", "Sentence\tCategory", "utterance\tintent", "words_said\tmeaning"])
def test_a_header_is_no_example(first: str, tmp_path: Path) -> None:
    opened = table(tmp_path, first, ROWS)
    assert cells(opened) == ROWS
    assert "a.tsv:1: taken as a header (text: " in opened.notes[0]
    assert "data.header=false reads it as a row" in opened.notes[0]


def test_a_header_gives_columns_in_any_order(tmp_path: Path) -> None:
    turned = [(label, str(number), text) for number, (text, label) in enumerate(ROWS)]
    assert cells(table(tmp_path, "label,id,text", turned, "a.csv")) == ROWS
    assert cells(table(tmp_path, "intent\tidx\tutterance", turned)) == ROWS


@pytest.mark.parametrize("first", ["", "red cat 41\tpos", "cat\tpos", "good morning\tgreeting"])
def test_a_row_is_no_header(first: str, tmp_path: Path) -> None:
    opened = table(tmp_path, first, ROWS)
    assert cells(opened) == [tuple(first.split("\t"))] * bool(first) + ROWS


def test_a_row_that_may_be_a_header_is_told(tmp_path: Path) -> None:
    words = [(f"word{number}", "noun" if number % 2 else "verb") for number in range(40)]
    opened = table(tmp_path, "entry\tkind", words)
    assert cells(opened)[0] == ("entry", "kind")
    assert "may be a header (entry, kind): data.header=true reads it as one" in opened.notes[0]
    assert cells(table(tmp_path, "entry\tkind", words, header=True)) == words


def test_the_setting_wins_over_the_rule(tmp_path: Path) -> None:
    assert cells(table(tmp_path, "text\tlabel", ROWS, header=False))[0] == ("text", "label")
    assert cells(table(tmp_path, "", ROWS, header=True)) == ROWS[1:]
    (tmp_path / "a.tsv").write_text("text\tlabel\nred\tpos\n")
    with pytest.raises(UserError, match=r"data\.header=false says that no line names columns, and 'text' is a name"):
        open_table(str(tmp_path / "a.tsv"), ("text", None), ROLES, tmp_path, header=False)


def test_a_label_that_is_a_name_of_a_column_elsewhere_keeps_its_row(tmp_path: Path) -> None:
    rows = [("what is a text", "question"), ("here is one", "text")] * 20
    assert cells(table(tmp_path, "text\tquestion", rows))[0] == ("text", "question")


def test_pairs_of_words_have_no_header_but_sentences_have(tmp_path: Path) -> None:
    names = ("source", "target")

    def first_cells(text: str) -> tuple[str, ...]:
        (tmp_path / "p.tsv").write_text(text)
        return next(open_table(str(tmp_path / "p.tsv"), (None, None), names, tmp_path).rows()).cells

    assert first_cells("it\tes\n" + "".join(f"w{n}\tv{n}\n" for n in range(30))) == ("it", "es")
    sentences = "".join(f"a man runs {n}\tein Mann läuft {n}\n" for n in range(30))
    assert first_cells("en\tde\n" + sentences) == ("a man runs 0", "ein Mann läuft 0")


def test_a_name_of_two_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text,label\na,b,c\n")
    with pytest.raises(UserError, match=r"a\.csv:1: 2 columns have the name 'text'; give the number"):
        open_table(str(tmp_path / "a.csv"), ("text", "label"), ROLES, tmp_path)


def test_a_quoted_cell_has_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    content = 'a,pos\r\n"two\nlines, and ""quotes""",neg\r\n"the\r\nend",pos\r\nlast,neg'
    path.write_bytes(content.encode())
    with path.open(newline="") as file:
        expected = [tuple(record) for record in csv.reader(file, strict=True)]
    rows = list(read_rows(path, [0, 1]))
    assert [row.cells for row in rows] == expected
    assert [row.location for row in rows] == [f"{path}:1", f"{path}:2-3", f"{path}:4-5", f"{path}:6"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('a,b\n"c,d\ne,f\n', r"a\.csv:2-3: this is no record of CSV: the quote that opens in it is not closed before"),
        ('a,b\n"c" d,e\n', r"a\.csv:2: this is no record of CSV: after the quote that closes a cell there is neither"),
        ("a,b\nc\rd,e\n", r"a\.csv:2: this is no record of CSV: a carriage return stands in it without a line feed"),
        ('a,b\n"c\nd"\n', r"a\.csv:2-3: column 1 \(counted from 0\) is missing; this line has 1 column"),
    ],
)
def test_what_is_no_record_names_its_lines(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content.encode())
    with pytest.raises(UserError, match=message):
        list(read_rows(tmp_path / "a.csv", [0, 1]))


def test_an_open_quote_does_not_read_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_records, "MAX_RECORD_CHARACTERS", 1000)
    (tmp_path / "a.csv").write_text('a,b\n"c,d\n' + "e,f\n" * 1000)
    with pytest.raises(UserError, match=r"a\.csv:2: the record that begins here has more than 1,000 characters"):
        list(read_rows(tmp_path / "a.csv", [0, 1]))


def test_a_cell_may_be_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{'x' * 300_000},pos\n")
    (row,) = read_rows(tmp_path / "a.csv", [0, 1])
    assert len(row.cells[0]) == 300_000


def test_blank_and_uneven_records_are_counted(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.csv", TableFindings()
    path.write_text("a,pos\n\nb,neg,more\n \nc,pos\nd,neg,x,y\n")
    assert len(list(read_rows(path, [0, 1], findings=findings))) == 4
    assert [str(finding) for finding in findings.found()] == [
        f"2 blank lines left out (first: {path}:2)",
        f"2 rows read that have more or fewer cells than the first (first: {path}:3)",
    ]


def opened(config: Any, form: str, cache: Path, batch_tokens: int = 64) -> OpenedData:
    return open_data(config, form, batch_tokens=batch_tokens, cache=cache, seed=0)


def test_rows_with_an_empty_cell_are_told(tmp_path: Path) -> None:
    source, target = tmp_path / "s.txt", tmp_path / "t.txt"
    source.write_text("".join(f"red cat {n}\n" for n in range(1, 61)))
    target.write_text("".join("\n" if n in (5, 9) else f"RED CAT {n}\n" for n in range(1, 61)))
    config = PairsData(path=(str(source), str(target)), tokenizer="char", valid=0.2)
    data = opened(config, "pairs", tmp_path / "run")
    assert any("2 rows with an empty cell left out (first:" in line for line in data.describe())
    again = opened(config, "pairs", tmp_path / "run")
    assert again.summary == data.summary
    assert data.summary is not None
    assert data.summary.left_out[0].first == f"{source}:5"
    assert sum(data.summary.counts.values()) == 58


def test_the_facts_of_a_table_are_those_of_its_rows(tmp_path: Path) -> None:
    rows = [(f"{'word ' * (number % 30)}{number}\x07", "good" if number % 3 else "bad") for number in range(200)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    config = LabelsData(path=str(tmp_path / "a.csv"), tokenizer="byte", max_length=50, valid=0.1)
    data = opened(config, "labelled", tmp_path / "run")
    facts = data.summary
    assert facts is not None
    lengths = np.array([len(text.encode()) + 2 for text, _ in rows])
    assert facts.lengths is not None
    assert (facts.lengths.median, facts.lengths.largest) == (int(np.median(lengths)), lengths.max())
    assert facts.lengths.beyond == (lengths > 50).sum()
    held_out = [example.target for example in data.examples("valid")]
    expected = {label: sum(row[1] == label for row in rows) - held_out.count(label) for label in ("good", "bad")}
    assert facts.labels == expected
    warning = " ".join(" ".join(facts.warnings()).split())
    share = (lengths > 50).mean()
    assert f"{(lengths > 50).sum()} of 200 texts ({share:.1%}) are cut at 50 tokens: the median is" in warning
    assert "data.max_length sets the limit" in warning
    lines = [f"{subject:<8} {text}" for subject, text in data.glance() if str(tmp_path) not in text]
    assert max(map(len, lines)) <= 80
    assert sum("e.g. " in line for line in lines) == 3
    assert all(line.isprintable() for line in lines)


def test_few_long_texts_are_no_warning(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"{'x' * (60 if n == 0 else 5)}{n}\t{n % 2}\n" for n in range(100)))
    config = LabelsData(path=str(tmp_path / "a.tsv"), tokenizer="byte", max_length=50, valid=0.3)
    facts = opened(config, "labelled", tmp_path / "run").summary
    assert facts is not None
    assert list(facts.warnings()) == []
    assert "1 of 100 texts cut at 50 tokens (data.max_length)" in list(facts.facts())


def test_running_text_that_looks_like_a_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("".join(f"{text},{label}\n" for text, label in ROWS))
    (tmp_path / "b.txt").write_text("".join(f"{text}, {label}\n" for text, label in ROWS))
    message = " ".join(
        " ".join(
            opened(TextData(path=str(tmp_path / "a.csv"), length=8), "next-token", tmp_path / "1").describe()
        ).split()
    )
    assert "a.csv looks like a table of 2 columns, and is read as running text" in message
    assert "train transformer-classifier data.path=" in message
    plain = opened(TextData(path=str(tmp_path / "b.txt"), length=8), "next-token", tmp_path / "2").describe()
    assert "looks like a table" not in " ".join(plain)


def test_every_path_is_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n")
    config = LabelsData(path=str(tmp_path / "a.tsv"), valid=str(tmp_path / "v.tsv"), test=str(tmp_path / "none/t.tsv"))
    with pytest.raises(UserError) as error:
        opened(config, "labelled", tmp_path / "run")
    first, second = str(error.value).splitlines()
    assert "v.tsv: there is no such file" in first
    assert first.endswith("(data.valid)")
    assert second.endswith("(data.test)")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_survey_of_large_data_reads_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"red cat {n}\t{'pos' if n % 2 else 'neg'}\n" for n in range(25_000)))
    config = LabelsData(path=str(tmp_path / "a.tsv"), tokenizer="byte", max_length=10)
    cache = tmp_path / "cache"
    cache.mkdir()
    survey = survey_data(config, "labelled", OpenRequest(64, cache))
    assert survey.summary is not None
    assert survey.summary.is_part
    assert sum(survey.summary.counts.values()) == 10_000
    assert any(subject == "warning" for subject, _ in survey.lines)


@pytest.mark.parametrize(
    ("name", "content", "texts", "expected"),
    [
        ("a.tsv", "red cat\tneg\nblue dog\tpos\n", ["red cat", "blue dog"], ["neg", "pos"]),
        ("a.csv", 'label,text\nneg,"red, cat"\npos,"blue\ndog"\n', ["red, cat", "blue\ndog"], ["neg", "pos"]),
        ("one.csv", 'text\n"red, cat"\n', ["red, cat"], [None]),
        ("one.tsv", "red cat\nblue dog\n", ["red cat", "blue dog"], [None, None]),
        ("id.csv", "id,text\n7,red cat\n", ["red cat"], [None]),
        ("a.txt", "red cat\tneg\nblue dog\tpos\n", ["red cat", "blue dog"], ["neg", "pos"]),
        ("b.txt", "red\u2028cat\nblue, dog\t!\n", ["red\u2028cat", "blue, dog\t!"], [None, None]),
        ("a.jsonl", '{"text": "red", "label": "pos"}\n{"text": "a"}\n', ["red", "a"], ["pos", None]),
    ],
)
def test_inputs_to_label_are_read_as_training_reads_them(
    name: str, content: str, texts: list[str], expected: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{('pos', 'neg')[n % 2]}\n" for n, text in enumerate(TEXTS)))
    config = LabelsData(path=str(tmp_path / "train.tsv"), tokenizer="byte")
    tokenizers = opened(config, "labelled", tmp_path / "run").tokenizers
    (tmp_path / name).write_bytes(content.encode())
    read = kind_of(config).unlabelled
    assert read is not None
    data = read(config, tokenizers, str(tmp_path / name), OpenRequest(64, tmp_path / "run"))
    assert list(data.texts) == texts
    inputs = list(data.inputs)
    assert [item.expected for item in inputs] == expected
    assert [item.name for item in inputs] == texts
