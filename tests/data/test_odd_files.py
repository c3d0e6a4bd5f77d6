"""Tables, texts and treebanks as nobody should write them, drawn by a seed: rows equal those of reference readers.

Where a reader of ours differs, it refuses with a sentence; it never gives other rows without a word."""

import csv
import io
import random
from collections.abc import Callable
from pathlib import Path

import conllu
import pytest

from manyformer.base.errors import UserError
from manyformer.data.pipeline.summary import TableFindings
from manyformer.data.text.table_files import read_rows
from manyformer.data.text.text_files import read_lines, split_lines
from manyformer.data.text.text_sources import text_sources
from manyformer.data.text.treebank import TreebankSentence, open_treebank

SEEDS = range(40)
PIECES = [
    *("red cat", "a,b", "tab\there", 'said "no"', '"', '""', "", " ", "line\nend", "both\r\nends", "lone\rreturn"),
    *("\u2028", "\u0085", "\x0b\x0c", "\x1c", "ß", "日本", "👩‍👩‍👧", "e\u0301", "\u202eright", "\ufeff", "\u00a0", "'"),
    *("-", "#", "7", "0.5", "x" * 5000, "label", "text", "\\n", "\x07"),
]


def odd_cell(draw: random.Random) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 3)))


def written(path: Path, text: str, draw: random.Random, *, marks: bool = True) -> Path:
    """The text as a file, at times with a byte order mark."""
    path.write_bytes((b"\xef\xbb\xbf" if marks and draw.random() < 0.3 else b"") + text.encode())
    return path


def odd_csv(draw: random.Random) -> str:
    """Records by `csv.writer`, at times spoiled: blank lines, ragged rows, a comma at the end, quotes by hand."""
    width, ends = draw.randint(2, 4), draw.choice(["\n", "\r\n"])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator=ends, quoting=draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    for _ in range(draw.randint(1, 12)):
        writer.writerow([odd_cell(draw) for _ in range(width + (draw.random() < 0.1))])
        spoiled = draw.random()
        if spoiled < 0.1:
            file.write(ends)
        elif spoiled < 0.15:
            file.write(f"plain,{'cells,' * (width - 1)}{ends}")
        elif spoiled < 0.18:
            file.write(f'half a "quote",inside{",x" * (width - 2)}{ends}')
    text = file.getvalue()
    return text.removesuffix(ends) if draw.random() < 0.3 else text


def refused_or(read: Callable[[], object]) -> object:
    """What is read, or the exception's sentence, which names the file."""
    try:
        return read()
    except UserError as error:
        sentence = str(error)
    assert "odd." in sentence
    assert "\n" not in sentence
    return "refused"


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_csv_files_are_read_as_by_the_csv_module(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path, findings = written(tmp_path / "odd.csv", odd_csv(draw), draw), TableFindings()
    actual = refused_or(lambda: [row.cells for row in read_rows(path, [0, 1], findings=findings)])
    with path.open(encoding="utf-8-sig", newline="") as file:
        expected = list(csv.reader(file))
    blank = [record for record in expected if not any(cell.strip() for cell in record) and len(record) < 2]
    if actual == "refused":
        # a carriage return alone ends a record of the csv module, and short rows lack a column
        assert "\r" in path.read_bytes().decode().replace("\r\n", "") or any(len(record) == 1 for record in expected)
        return
    rows = [tuple(record[:2]) for record in expected if record not in blank]
    assert actual == rows
    assert findings.blank.count == len(blank)
    widths = [len(record) for record in expected if record not in blank]
    assert findings.uneven.count == sum(width != widths[0] for width in widths)


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_tsv_files_are_read_as_lines_divided_at_tabs(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    width, ends = draw.randint(2, 4), draw.choice(["\n", "\r\n"])
    lines = ["\t".join(odd_cell(draw) for _ in range(width)) for _ in range(draw.randint(1, 12))]
    path, findings = written(tmp_path / "odd.tsv", ends.join(lines) + ends * draw.randint(0, 2), draw), TableFindings()
    actual = refused_or(lambda: [row.cells for row in read_rows(path, [0, 1], findings=findings)])
    raw = path.read_bytes().decode("utf-8-sig").split("\n")
    cells = [line.removesuffix("\r").split("\t") for line in raw[: None if raw[-1] else -1]]
    kept = [row for row in cells if len(row) > 1 or row[0].strip()]
    if actual == "refused":
        assert any(len(row) < 2 for row in kept)
        return
    assert actual == [tuple(row[:2]) for row in kept]
    assert findings.blank.count == len(cells) - len(kept)


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_lines_are_the_same_for_every_reader(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    text = "".join(odd_cell(draw) + draw.choice(["\n", "\r\n", ""]) for _ in range(20))
    path = written(tmp_path / "odd.txt", text, draw)
    whole = path.read_bytes().decode("utf-8-sig")
    expected = [line.removesuffix("\r") for line in whole.split("\n")[:-1]] + [whole.split("\n")[-1]] * bool(
        whole.split("\n")[-1]
    )
    assert [line.text for line in read_lines(path)] == split_lines(whole) == expected
    (source,) = text_sources(str(path), None, tmp_path)
    assert "".join(part.text for part in source.parts()) == whole


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["odd.csv", "odd.tsv", "odd.txt"])
def test_other_encodings_are_refused(encoding: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes("text,label\nred cat,pos\nblue dog,neg\n".encode(encoding))
    with pytest.raises(UserError, match="it looks like UTF-"):
        list(read_rows(tmp_path / name, [0, 1]))


def test_a_nul_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_bytes(b"red cat,pos\nblue\0dog,neg\n")
    with pytest.raises(UserError, match=r"odd\.csv: a NUL byte at byte 16"):
        list(read_rows(tmp_path / "odd.csv", [0, 1]))


FORMS = ["cat", "ß", "日本", "e\u0301", "\u00a0", "\u2028", "#", "1", "_", "don't", "x" * 3000, "10 000", "\x0c", "'"]
SPOILED_FORMS = [*FORMS, "", " ", "two  spaces"]


def odd_treebank(draw: random.Random) -> str:
    """Sentences that hang together, at times with an odd form, a multiword token, an empty node or a bad line."""
    blocks = []
    for number in range(draw.randint(1, 5)):
        size = draw.randint(1, 7)
        lines = [f"# sent_id = s{number}"] * (draw.random() < 0.7)
        if size > 1 and draw.random() < 0.3:
            lines.append("1-2\tboth\t_\t_\t_\t_\t_\t_\t_\t_")
        for word in range(1, size + 1):
            form = draw.choice(SPOILED_FORMS if draw.random() < 0.05 else FORMS)
            lines.append(f"{word}\t{form}\t_\tNOUN\t_\t_\t{word - 1}\t{draw.choice(['root', 'obj:x'])}\t_\t_")
            if draw.random() < 0.1:
                lines.append(f"{word}.1\tgone\t_\t_\t_\t_\t_\t_\t_\t_")
        if draw.random() < 0.05:
            lines.append(draw.choice(["loose text", f" {size + 1}\tcat\t_\tNOUN\t_\t_\t0\troot\t_\t_", "\t\t\t"]))
        blocks.append("\n".join(lines))
    return draw.choice(["\n\n", "\n\n\n", "\n \n"]).join(blocks) + draw.choice(["", "\n", "\n\n"])


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_treebanks_are_read_as_by_the_conllu_package(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    text = odd_treebank(draw)
    path = written(tmp_path / "odd.conllu", text, draw)

    def read() -> list[TreebankSentence]:
        return [TreebankSentence.from_row(row) for row in open_treebank(str(path), "deprel", tmp_path).rows()]

    actual = refused_or(read)
    if actual == "refused":
        bad = ("\t\t_", "\t \t_", "two  spaces", "loose text", "\n ", "\t\t\t")
        assert any(part in text for part in bad)
        return
    words = [[word for word in sentence if isinstance(word["id"], int)] for sentence in conllu.parse(text)]
    assert isinstance(actual, list)
    assert [sentence.forms for sentence in actual] == [[word["form"] for word in sentence] for sentence in words]
    assert [sentence.heads for sentence in actual] == [[word["head"] for word in sentence] for sentence in words]
    assert [sentence.labels for sentence in actual] == [[word["deprel"] for word in sentence] for sentence in words]
