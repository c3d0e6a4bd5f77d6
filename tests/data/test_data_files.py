"""Reading files: plain and gzipped, in parts, strict UTF-8, and one sentence for each way in which they are bad."""

import gzip
import io
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyformer.base.errors import UserError
from manyformer.config import TextData
from manyformer.data import open_data
from manyformer.data.audio.audio_files import audio_files
from manyformer.data.images.image_files import folder_image_files, open_image_files
from manyformer.data.pipeline import data_paths
from manyformer.data.text import text_files
from manyformer.data.text.pair_tables import open_table
from manyformer.data.text.table_files import read_parallel, read_rows
from manyformer.data.text.text_files import decode_text, folder_files
from manyformer.data.text.text_sources import text_sources
from manyformer.data.text.treebank import open_treebank


def written(folder: Path, name: str, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def documents(path: str, cache: Path, column: str | None = None) -> list[str]:
    actual: list[str] = []
    for source in text_sources(path, column, cache):
        for part in source.parts():
            if part.starts_document:
                actual.append("")
            actual[-1] += part.text
    return actual


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.integers(1, 7))
@example("\ufefftext", 1)
@settings(max_examples=150, deadline=None)
def test_parts_of_any_size_give_the_whole_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = written(tmp_path_factory.mktemp("text"), "a.txt", text)
    assert "".join(text_files.read_chunks(path, size)) == text.removeprefix("\ufeff")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"))))
@settings(max_examples=100, deadline=None)
def test_lines_end_at_newlines_alone(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = written(tmp_path_factory.mktemp("lines"), "a.txt.gz", "x\r\n" + "".join(text + "\n" for text in texts))
    assert [line.text for line in text_files.read_lines(path)] == ["x", *texts]
    assert [line.number for line in text_files.read_lines(path)] == list(range(1, len(texts) + 2))


def test_a_long_document_comes_in_parts_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files.read_chunks, "__defaults__", (50,))
    text = "".join(f"line number {number}\n" for number in range(40))
    path = written(tmp_path, "long.txt", text)
    (source,) = text_sources(str(path), None, tmp_path)
    parts = list(source.parts())
    assert len(parts) > 5
    assert "".join(part.text for part in parts) == text
    assert all(part.text.endswith("\n") for part in parts)
    assert [part.starts_document for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends_document for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    for name in ("b.txt", "a.md", "sub/c.py.gz", "sub/a.txt", "picture.png", ".hidden.txt", "__pycache__/d.py"):
        written(folder, name, f"text of {name}")
    written(folder, "empty.txt", "")
    written(folder, "records.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    assert documents(str(folder), tmp_path) == [
        "text of a.md", "text of b.txt", "one", "two", "text of sub/a.txt", "text of sub/c.py.gz"
    ]  # fmt: skip


def test_standard_input_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größe\n".encode())))
    assert documents("-", tmp_path) == ["größe\n"]
    # Read to its end, it gives nothing more: the copy serves. So it does where the same is piped in again.
    assert documents("-", tmp_path) == ["größe\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größe\n".encode())))
    assert documents("-", tmp_path) == ["größe\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"other\n")))
    with pytest.raises(UserError, match="standard input differs from the text that this run started with"):
        documents("-", tmp_path)


def test_jsonl_with_columns_inside(tmp_path: Path) -> None:
    lines = '{"translation": {"en": "a\\tb", "de": "c"}, "id": 7}\n{"translation": {"en": "d", "de": "e"}, "id": 8}\n'
    path = written(tmp_path, "pairs.jsonl.gz", lines)
    actual = [row.cells for row in read_rows(path, ["translation.en", "translation.de", "id"])]
    assert actual == [("a\tb", "c", "7"), ("d", "e", "8")]


def test_tsv_by_number_and_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "data.tsv", 'text\tlabel\nhello "there\tgood\nbye\tbad\n')
    assert [row.cells for row in read_rows(path, ["label", "text"])] == [("good", 'hello "there'), ("bad", "bye")]
    assert next(row.cells for row in read_rows(path, [0, 1])) == ("text", "label")
    assert [row.location for row in read_rows(path, ["text"])] == [f"{path}:2", f"{path}:3"]


def test_parallel_files(tmp_path: Path) -> None:
    one, two = written(tmp_path, "a.en", "a\nb \u2028 c\n"), written(tmp_path, "a.de.gz", "x\ny")
    assert [row.cells for row in read_parallel(one, two)] == [("a", "x"), ("b \u2028 c", "y")]


def test_wrong_encodings_name_the_byte(tmp_path: Path) -> None:
    raw = "größe ".encode() * 1000
    for name in ("a.txt", "a.txt.gz"):
        path = written(tmp_path, name, raw + b"caf\xe9 \n")
        with pytest.raises(UserError, match=rf"{name}: not UTF-8 at byte {len(raw) + 3} \(0xe9\)"):
            list(text_files.read_chunks(path, 1001))
    with pytest.raises(UserError, match=r"cut\.txt: not UTF-8 at byte 1 \(0xc3\)"):
        list(text_files.read_chunks(written(tmp_path, "cut.txt", b"a\xc3")))


@pytest.mark.parametrize(
    ("one", "two", "line", "short"), [("a\nb\nc\n", "x\n", 2, "two"), ("a\n", "x\ny\nz\n", 2, "one")]
)
def test_unequal_parallel_files_name_the_line(tmp_path: Path, one: str, two: str, line: int, short: str) -> None:
    paths = written(tmp_path, "one.txt", one), written(tmp_path, "two.txt", two)
    sentence = (
        rf"one\.txt has {one.count(chr(10))} lines and .*two\.txt has {two.count(chr(10))}: line {line} .* in .*{short}"
    )
    with pytest.raises(UserError, match=sentence):
        list(read_parallel(*paths))


def test_bad_files_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "train.txt", "text")
    with pytest.raises(UserError, match=r"trian\.txt: there is no such file; did you mean .*train\.txt\?"):
        text_sources(str(tmp_path / "trian.txt"), None, tmp_path)
    with pytest.raises(UserError, match=r"there is no such file \(nor a folder .*nowhere\)"):
        text_sources(str(tmp_path / "nowhere" / "a.txt"), None, tmp_path)
    (tmp_path / "link.txt").symlink_to("gone.txt")
    with pytest.raises(UserError, match=r"link\.txt: this is a link to gone\.txt, and there is no file or folder$"):
        text_sources(str(tmp_path / "link.txt"), None, tmp_path)
    for name in ("empty.txt", "empty.txt.gz", "empty.jsonl"):
        with pytest.raises(UserError, match=rf"{name}: this file is empty"):
            text_sources(str(written(tmp_path, name, "")), None, tmp_path)
    written(tmp_path, "pictures/a.png", "x")
    with pytest.raises(UserError, match=r"pictures: this folder holds no text files \(looked for \.txt"):
        text_sources(str(tmp_path / "pictures"), None, tmp_path)
    written(tmp_path, "blank/a.txt", "")
    with pytest.raises(UserError, match="blank: all files in this folder are empty"):
        text_sources(str(tmp_path / "blank"), None, tmp_path)
    with pytest.raises(UserError, match="this is a folder; give a file"):
        list(text_files.read_lines(tmp_path / "blank"))
    damaged = written(tmp_path, "damaged.txt.gz", "text " * 1000)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"damaged\.txt\.gz: this gzip file is damaged or incomplete"):
        list(text_files.read_chunks(damaged))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="nothing is piped in"):
        text_sources("-", None, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "columns", "sentence"),
    [
        ("a.tsv", "a\tb\nc\n", [0, 1], r"a\.tsv:2: column 1 \(counted from 0\) is missing; this line has 1 column,"),
        ("b.tsv", "text\tlabel\n", ["lable"], r"b\.tsv:1: the first line has no column 'lable'; did you mean label\?"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"txt": "b"}\n',
            ["text"],
            r"a\.jsonl:2: column 'text' is missing; did you mean txt\?",
        ),
        ("b.jsonl", '{"text": "a"}\n{"text":\n', ["text"], r"b\.jsonl:2: this line is not a JSON object"),
        ("c.jsonl", '["a"]\n', ["text"], r"c\.jsonl:1: a JSON object such as"),
        ("d.jsonl", '{"text": null}\n', ["text"], r"d\.jsonl:1: column 'text' must be text, and this is null"),
        (
            "e.jsonl",
            '{"text": "\\ud800"}\n',
            ["text"],
            r"e\.jsonl:1: this line is not a JSON object \(unexpected end of hex",
        ),
    ],
)
def test_bad_rows_name_the_line(
    tmp_path: Path, name: str, content: str, columns: list[int | str], sentence: str
) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(UserError, match=sentence):
        list(read_rows(path, columns))


LETTERS = "The letters of a text, some of which are not ASCII: ä, é, ß.\n" * 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (LETTERS.encode("utf-16"), "looks like UTF-16; convert it with `iconv -f utf-16 -t utf-8 a.txt`"),
        (LETTERS.encode("utf-16-le"), "looks like UTF-16; convert it with `iconv -f utf-16le -t utf-8 a.txt`"),
        (LETTERS.encode("utf-16-be"), "looks like UTF-16; convert it with `iconv -f utf-16be -t utf-8 a.txt`"),
        (LETTERS.encode("utf-32"), "looks like UTF-32; convert it with `iconv -f utf-32 -t utf-8 a.txt`"),
        (LETTERS.encode("latin1"), "if it is text, convert it, for instance `iconv -f latin1 -t utf-8 a.txt`"),
        (
            LETTERS.encode("utf-8") * 99 + b"\0",
            "a NUL byte at byte 25344; text has none: the file is damaged or binary data",
        ),
        (bytes(range(256)) * 8, "this is binary data, not text"),
        (bytes(5000), "this is binary data, not text"),
        (b"\x80\x04\x95\x07\x08" * 9, "this is binary data or text in an encoding"),
        (b"PK\x03\x04" + bytes(range(9)), "this is a zip archive"),
        (b"PAR1\x15\x04\x15\xc0", "this is a Parquet file"),
    ],
)
def test_what_is_not_utf8_is_said_to_be_what_it_looks_like(tmp_path: Path, content: bytes, sentence: str) -> None:
    for name in ("a.txt", "a.txt.gz"):
        path = written(tmp_path, name, content)
        with pytest.raises(UserError) as error:
            list(text_files.read_lines(path))
        assert sentence in str(error.value)
        assert str(path) in str(error.value)
        assert ("latin1" in str(error.value)) == ("latin1" in sentence)
    if content.startswith(LETTERS.encode()):
        return
    with pytest.raises(UserError) as error:
        decode_text(content, "standard input, line 1", "a.txt")
    assert sentence.split("; ")[-1] in str(error.value)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' * 100_000, '{"text": ' + "9" * 10_000 + "}"])
def test_deep_and_long_values_in_json_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "a"}\n' + line + "\n")
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: this line is not a JSON object \((recursion limit|number out of)"
    ):
        list(read_rows(path, ["text"]))


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text_files, data_paths):
        monkeypatch.setattr(module, "MAX_LINE_CHARACTERS", 1000)
    monkeypatch.setattr(text_files.read_chunks, "__defaults__", (64,))
    path = written(tmp_path, "long.txt", "short\n" * 400 + "x" * 2000)
    with pytest.raises(UserError, match=r"long\.txt:401: this line has more than 1,000 characters"):
        list(text_files.read_lines(path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    with pytest.raises(UserError, match="standard input, line 401: this line has 1,000 bytes or more"):
        list(data_paths.stdin_lines())


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero", "/dev/null"])
def test_devices_are_no_data(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=f"{path}: this is a device; give a file or a folder"):
        documents(path, tmp_path)
    with pytest.raises(UserError, match="this is a device"):
        list(open_table(path, [0, 1], ["source", "target"], tmp_path).rows())
    with pytest.raises(UserError, match="this is a device"):
        open_treebank(path, None, tmp_path)
    with pytest.raises(UserError, match="this is a device"):
        open_image_files(path)


def test_a_pipe_is_copied_because_it_is_read_several_times(tmp_path: Path) -> None:
    pipe, cache = tmp_path / "pipe", tmp_path / "cache"
    cache.mkdir()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"the text",))
    writer.start()
    (source,) = text_sources(str(pipe), None, cache)
    writer.join()
    assert [part.text for _ in range(2) for part in source.parts()] == ["the text"] * 2
    with pytest.raises(UserError, match="this is a pipe, which can be read only once"):
        open_image_files(str(pipe))


def test_a_pipe_that_nothing_writes_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(data_paths, "WRITER_SECONDS", 0.2)
    with pytest.raises(UserError, match="pipe: no program writes into this pipe"):
        text_sources(str(pipe), None, tmp_path)


def test_a_pipe_whose_program_is_slow_to_write_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, cache = tmp_path / "pipe", tmp_path / "cache"
    cache.mkdir()
    os.mkfifo(pipe)
    monkeypatch.setattr(data_paths, "WRITER_SECONDS", 5.0)

    def write_slowly() -> None:
        with pipe.open("wb", buffering=0) as file:
            for word in (b"late, ", b"and slow"):
                time.sleep(0.3)
                file.write(word)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    (source,) = text_sources(str(pipe), None, cache)
    writer.join()
    assert [part.text for part in source.parts()] == ["late, and slow"]


def test_standard_input_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        for read in (lambda: documents("-", tmp_path), lambda: list(data_paths.stdin_lines())):
            with pytest.raises(UserError, match="standard input is a device, which has no end"):
                read()


def test_a_name_of_no_user_is_no_path() -> None:
    with pytest.raises(UserError, match=r"~nobody-of-that-name/a: there is no user of that name"):
        text_files.existing_path("~nobody-of-that-name/a")


def test_a_folder_says_which_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in ("README.md", "deep/mnist.npz", "photo.png", "notes.odt", "a.bin", ".hidden"):
        written(folder, name, "words " * 400)
    data = TextData(path=str(folder), tokenizer="byte", length=8)
    lines = open_data(data, "next-token", batch_tokens=16, cache=tmp_path / "cache", seed=0).describe()
    assert f"1 file read of {folder} (README.md), 4 not read (a.bin, deep/mnist.npz, notes.odt, ...)" in lines


def test_what_is_no_file_among_those_of_a_folder_is_refused_instead_of_missing(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    written(folder, "a.txt", "text")
    (folder / "link").symlink_to("gone")
    assert [file.name for file in folder_files(folder)] == ["a.txt"]
    for suffix, files in ((".txt", folder_files), (".wav", audio_files), (".png", folder_image_files)):
        pipe = folder / f"b{suffix}"
        os.mkfifo(pipe)
        with pytest.raises(UserError, match=rf"b\{suffix}: this is a pipe"):
            files(folder)
        pipe.unlink()
        pipe.symlink_to("gone")
        with pytest.raises(UserError, match=rf"b\{suffix}: this is a link to gone"):
            files(folder)
        pipe.unlink()
