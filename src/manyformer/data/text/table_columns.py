"""The columns of a TSV or CSV file by their roles: by the settings, else by names in its header, else by position.

A first line is a header if `data.header` says so, if a setting names a column, or, without either,

- if its cells are names that columns usually have (text, label, source, id, ...), and its label is no label of the rows
  that follow;
- or if it looks like names, its label is that of no other row although the labels of the others recur, and the rest of
  the file differs from it: all other labels are numbers, or texts of several words.

Only the first rows are looked at, and a line tells what was taken for a header, or what may be one.
A file of running text that looks like a table is named, too: its separators and labels would be learned as text.
"""

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from manyformer.base.errors import UserError
from manyformer.data.text.table_files import ColumnKey, Record, index_of_column, is_csv, read_records
from manyformer.data.text.text_files import read_chunks

ROWS_LOOKED_AT = 1000
"""The records from the beginning of a file that decide whether its first line is a header."""
CHARACTERS_LOOKED_AT = 1 << 22
"""The most characters of these records, for tables whose cells are whole documents."""
_BYTES_LOOKED_AT = 1 << 16
_RECORDS_LOOKED_AT = 50
_FEWEST_RECORDS = 3
_FEWEST_ROWS = 20
"""With fewer rows, that a label is not repeated says nothing."""
_LARGEST_SHARE_OF_NAMES = 0.1
"""Texts are no names if at most this share of them is a single word."""
_SETTING_OF_ROLE = {"transcript": "label"}
"""The setting of a role that has another name."""
_SHOWN = 60
"""The characters of a first line that a message shows."""
_NAME = re.compile(r"[^\W\d][\w.:\-/# ]{0,39}")
_WORD = re.compile(r"\w[\w.\-/#]*")
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
NAMES_OF_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "text": (
        *("text", "sentence", "utterance", "review", "comment", "content", "tweet", "message", "body", "query"),
        *("question", "document", "headline", "title", "description", "input", "news", "article", "sms", "phrase"),
    ),
    "label": (
        *("label", "labels", "category", "class", "intent", "target", "sentiment", "topic", "emotion", "polarity"),
        *("rating", "stars", "score", "gold", "type", "tag", "genre", "language", "output", "y", "relation"),
        *("gold_label", "label_text", "coarse_label", "classification", "similarity"),
    ),
    "source": ("source", "src", "source_text", "input", "original", "text", "from"),
    "target": ("target", "tgt", "target_text", "trg", "translation", "output", "reference", "summary", "to"),
    "first": ("first", "sentence1", "sentence_1", "sentence_a", "premise", "text1", "text_a", "question1", "query"),
    "second": ("second", "sentence2", "sentence_2", "sentence_b", "hypothesis", "text2", "text_b", "question2"),
    "document": ("document", "context", "passage", "paragraph", "article", "text", "story"),
    "question": ("question", "query"),
    "answer": ("answer", "answer_text", "answers", "span"),
    "start": ("start", "answer_start", "offset"),
    "transcript": ("text", "transcript", "transcription", "sentence", "utterance", "words", "normalized_text", "label"),
    "group": ("group", "speaker", "speaker_id", "client_id"),
    "audio": (
        "path",
        "audio",
        "file",
        "filename",
        "file_name",
        "wav",
        "wav_filename",
        "audio_path",
        "audio_file",
        "filepath",
        "file_path",
        "clip",
        "recording",
    ),
}
"""Names that a column of a role usually has, the most telling first; they are compared without regard to case."""
_LANGUAGES = (
    *("ar", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi", "fr", "ga", "gl"),
    *("he", "hi", "hr", "hu", "id", "it", "ja", "ko", "lt", "lv", "ms", "mt", "nb", "nl", "nn", "no", "pl", "pt"),
    *("ro", "ru", "sk", "sl", "sq", "sr", "sv", "sw", "ta", "th", "tr", "uk", "ur", "vi", "zh", "english"),
    *("german", "french", "spanish", "italian", "dutch", "portuguese", "russian", "chinese", "japanese", "korean"),
    *("arabic", "hindi", "turkish", "polish", "czech", "swedish"),
)
OTHER_NAMES = ("id", "idx", "index", "uid", "guid", "split", "date", "author", "user", "unnamed:_0", "")
_COLUMN_NAMES = frozenset([*(name for names in NAMES_OF_COLUMNS.values() for name in names), *_LANGUAGES, *OTHER_NAMES])


class HeaderGuess(Enum):
    """The kind of a first line: names of columns, a row, or a row that may be names."""

    HEADER = "header"
    ROW = "row"
    MAYBE = "maybe"


class TableColumns(NamedTuple):
    """The column of each role, counted from 0 (None for an optional one that is missing), and whether the first record
    is a header; `notes` are lines about it for the log."""

    indices: tuple[int | None, ...]
    has_header: bool
    notes: tuple[str, ...] = ()


def find_columns(
    path: Path,
    keys: Sequence[ColumnKey | None],
    roles: Sequence[str],
    *,
    header: bool | None = None,
    optional: int = 0,
) -> TableColumns:
    """The columns of the roles in a file, whose first records are read.

    A key is the setting of a role: a number, a name, or None. The last `optional` roles may be missing. With `header`
    None the rule of `guess_header` decides whether there is one. Raises UserError for a name that the file lacks.
    """
    records = _first_records(path)
    # an empty file is refused by who reads it, who can say what is missing
    if not records:
        return TableColumns(tuple(_positions(keys)), has_header=False)
    first, *rows = records
    where = first.location(str(path))
    # a name can only be found in a header
    if any(isinstance(key, str) for key in keys):
        if header is False:
            named = next(key for key in keys if isinstance(key, str))
            raise UserError(f"{where}: data.header=false says that no line names columns, and {named!r} is a name")
        return TableColumns(_named_columns(first.cells, keys, roles, where, optional), has_header=True)
    # only data to label may have a single column: that of the text
    positions = _positions(keys, len(first.cells) if optional else None)
    guess = HeaderGuess.HEADER if header else HeaderGuess.ROW
    if header is None:
        guess = guess_header(first.cells, [row.cells for row in rows], roles, positions, optional)
    if guess is HeaderGuess.HEADER:
        indices = _named_columns(first.cells, keys, roles, where, optional)
        remedy = "" if header else "; data.header=false reads it as a row"
        note = f"{where}: taken as a header ({_describe_columns(first, roles, indices)}){remedy}"
        return TableColumns(indices, has_header=True, notes=(note,))
    notes: tuple[str, ...] = ()
    if guess is HeaderGuess.MAYBE:
        names = ", ".join(first.cells)
        if len(names) > _SHOWN:
            names = f"{names[:_SHOWN]}..."
        notes = (f"{where}: read as a row, and may be a header ({names}): data.header=true reads it as one",)
    return TableColumns(_present(positions, len(first.cells), optional), has_header=False, notes=notes)


def _describe_columns(header: Record, roles: Sequence[str], indices: Sequence[int | None]) -> str:
    """The name of the column of each role, of those that the header has."""
    return ", ".join(
        f"{role}: {header.cells[index]!r}"
        for role, index in zip(roles, indices)
        if index is not None and index < len(header.cells)
    )


def _first_records(path: Path) -> list[Record]:
    """The first records that are not blank, as many as are looked at."""

    def bounded() -> Iterator[Record]:
        characters = 0
        for record in read_records(path):
            characters += sum(map(len, record.cells))
            if record.cells:
                yield record
            # a record may be a whole book, of which a thousand would take minutes
            if characters > CHARACTERS_LOOKED_AT:
                return

    return list(islice(bounded(), ROWS_LOOKED_AT + 1))


def _positions(keys: Sequence[ColumnKey | None], width: int | None = None) -> list[int]:
    """The columns by number: the role's own place where no setting gives one.

    A file of one column is that of the first role, wherever the settings have it, if `width` says that it has one."""
    if width == 1:
        return list(range(len(keys)))
    return [key if isinstance(key, int) else number for number, key in enumerate(keys)]


def _present(columns: Sequence[int], width: int, optional: int) -> tuple[int | None, ...]:
    """The columns, None for an optional one that a record of this width lacks."""
    required = len(columns) - optional
    return tuple(None if number >= required and column >= width else column for number, column in enumerate(columns))


def _named_columns(
    header: Sequence[str], keys: Sequence[ColumnKey | None], roles: Sequence[str], where: str, optional: int
) -> tuple[int | None, ...]:
    """The columns by the settings, then by the names that columns usually have, then the remaining ones in order."""
    # settings first, then usual names, then what is left in order: what is sure is never given away
    by_setting = [None if key is None else index_of_column(key, header, where) for key in keys]
    usual = usual_columns(header, roles)
    # a column holds one role
    taken = {index for index in by_setting if index is not None}
    columns = list(by_setting)
    for number, index in enumerate(usual):
        if columns[number] is None and index is not None and index not in taken:
            columns[number] = index
            taken.add(index)
    required = len(keys) - optional
    remaining = iter(number for number in range(len(header)) if number not in taken)
    for number in range(len(columns)):
        if columns[number] is None:
            column = next(remaining, None)
            # what is optional is not the number or the author of a text
            is_other = column is not None and plain_name(header[column]) in OTHER_NAMES
            if number >= required and (is_other or len(header) > len(keys)):
                columns[number] = None
            else:
                columns[number] = column
    for number, column in enumerate(columns[:required]):
        if column is None:
            raise UserError(
                f"{where}: this header has no column for the {roles[number]}; name it with "
                f"data.{_SETTING_OF_ROLE.get(roles[number], roles[number])}"
            )
    return tuple(columns)


def usual_columns(header: Sequence[str], roles: Sequence[str]) -> list[int | None]:
    """The column of each role by the names of a header; None where no column has a name of the role."""
    names = [plain_name(cell) for cell in header]
    columns: list[int | None] = []
    for role in roles:
        # the role's own name first: it is the surest
        candidates = (role, *NAMES_OF_COLUMNS.get(role, ()))
        free = [name for name in candidates if name in names and names.index(name) not in columns]
        columns.append(names.index(free[0]) if free else None)
    return columns


def plain_name(cell: str) -> str:
    """The name in a cell of a header, as it is compared with names that columns usually have."""
    if cell.strip():
        return re.sub(r"[ \-]+", "_", cell.strip()).casefold()
    return ""


def guess_header(
    first: Sequence[str],
    rows: Sequence[Sequence[str]],
    roles: Sequence[str],
    columns: Sequence[int],
    optional: int = 0,
) -> HeaderGuess:
    """The kind of the first record of a table, by the records that follow it.

    `columns` are those of the roles if it is a row; the last `optional` ones may be missing. The labels are in the
    column of the role "label"; a table without one, whose rows do not show what a name is, has a header if its texts
    have several words."""
    # the surest sign of a row: a sentence, a number or a repeated cell
    if not _look_like_names(first):
        return HeaderGuess.ROW
    label_column = None
    if "label" in roles:
        label_column = columns[roles.index("label")]
    labels = Counter(row[label_column] for row in rows if label_column is not None and len(row) > label_column)
    # the label of the first line, if it is a row
    label = None
    if label_column is not None and label_column < len(first):
        label = first[label_column]
    text_columns = [column for column in columns if column != label_column and column < len(first)]
    are_texts = _are_texts([row[column] for row in rows for column in text_columns if len(row) > column])
    named = usual_columns(first, roles)
    are_usual = all(plain_name(cell) in _COLUMN_NAMES for cell in first)
    if None not in named or are_usual:
        has_roles = None not in named[: len(roles) - optional]
        has_own_names = [plain_name(first[index]) for index in named if index is not None] == list(roles)
        # a name of a file is no column, and a label no label of the rows that follow
        is_certain = has_roles and ("label" in roles or "audio" in roles or has_own_names)
        repeats = label in labels or _repeats_as_cells(first, rows)
        if not repeats and (is_certain or are_texts):
            return HeaderGuess.HEADER
        return HeaderGuess.MAYBE
    # without usual names only the contrast with the other rows may say that it is a header
    if label is None or label in labels or len(rows) < _FEWEST_ROWS or 2 * len(labels) > len(rows):
        return HeaderGuess.ROW
    first_texts = [first[column] for column in text_columns]
    if are_texts and all(_WORD.fullmatch(text) for text in first_texts):
        return HeaderGuess.HEADER
    return _guess_by_labels(first, rows, labels)


def _guess_by_labels(first: Sequence[str], rows: Sequence[Sequence[str]], labels: "Counter[str]") -> HeaderGuess:
    """The kind of a first record without usual names, whose label is none of those of the rows that follow."""
    if all(_NUMBER.fullmatch(row_label) for row_label in labels) and not _repeats_as_cells(first, rows):
        return HeaderGuess.HEADER
    # every other label recurs, so one that does not may be a name
    if min(labels.values()) > 1:
        return HeaderGuess.MAYBE
    return HeaderGuess.ROW


def _look_like_names(cells: Sequence[str]) -> bool:
    """Whether these may be names of columns: short, different, and no numbers; the name of an index may be empty."""
    # pandas writes an index without a name
    names = [cell.strip() for cell in cells if cell.strip()]
    return bool(names) and len(set(names)) == len(names) and all(_NAME.fullmatch(name) for name in names)


def _repeats_as_cells(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the cells of the first record are also cells of the same columns further down, as single words are."""
    return any(len(row) > column and row[column] == cell for row in rows for column, cell in enumerate(first) if cell)


def _are_texts(texts: Collection[str]) -> bool:
    """Whether hardly any of these is a single word."""
    single = sum(bool(_WORD.fullmatch(text)) for text in texts)
    return bool(texts) and single <= _LARGEST_SHARE_OF_NAMES * len(texts)


def describe_tables(paths: Iterable[Path]) -> str:
    """A line about files that are read as running text and look like tables; "" if none does."""
    tables = [(path, width) for path in paths if (width := columns_of_table(path))]
    if not tables:
        return ""
    path, width = tables[0]
    more_files = ""
    if len(tables) > 1:
        more_files = f" (and {len(tables) - 1:,} more)"
    return (
        f"{path}{more_files} looks like a table of {width} columns, and is read as running text, with separators, "
        f"quotes and labels; `manyformer train transformer-classifier data.path={path}` reads labelled texts, "
        f"`train transformer` pairs"
    )


def columns_of_table(path: Path) -> int:
    """The number of cells that all first records of a file have; 0 for one that does not look like a table.

    In a file that is no CSV by its name, cells are between tabs; a tab that begins every line, as in code, is none."""
    records = list(islice(_head_records(path), _RECORDS_LOOKED_AT))
    widths = {len(cells) for cells in records}
    # running text has lines of different numbers of tabs
    if len(widths) != 1 or len(records) < _FEWEST_RECORDS or all(not cells[0].strip() for cells in records):
        return 0
    width = widths.pop()
    if width > 1:
        return width
    return 0


def _head_records(path: Path) -> Iterator[list[str]]:
    """The records that are whole in the first bytes of a file, without blank lines."""
    head = next(read_chunks(path, _BYTES_LOOKED_AT), "")
    # the last line may be cut off
    lines = [f"{line}\n" for line in head.split("\n")[:-1]]
    if not is_csv(path):
        yield from (line.rstrip("\r\n").split("\t") for line in lines if line.strip())
        return
    with suppress(csv.Error):
        yield from (cells for cells in csv.reader(lines, strict=True) if cells)
