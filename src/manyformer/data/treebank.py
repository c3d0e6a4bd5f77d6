"""CoNLL-U files as rows: words, labels and heads of a sentence, each mistake told with its line and sentence."""

from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.pair_tables import RowTable
from manyformer.data.table_files import TableRow
from manyformer.data.text_files import STDIN, NumberedLine, existing_path, keep_stdin, lines
from manyformer.data.text_sources import stamp_of
from manyformer.dependency_trees import preorder_columns
from manyformer.errors import UserError

# What no word, label or number of a file in columns can hold.
SEPARATOR = "\t"
# The columns up to the relation; "features" has no parser, as nobody asks for them.
_FIELDS = ("id", "form", "lemma", "upos", "xpos", "features", "head", "deprel")
LABELS: dict[str, Callable[[Any], str | None]] = {
    "relation": lambda word: word["deprel"].partition(":")[0],
    "deprel": lambda word: word["deprel"],
    "upos": lambda word: word["upos"],
    "xpos": lambda word: word["xpos"],
}
COLUMNS = {"relation": 7, "deprel": 7, "upos": 3, "xpos": 4}
"""Where a label stands in a line, counted from 0."""
UNKNOWN = "_"
"""What stands for a label that is not given."""


class TreebankSentence(NamedTuple):
    """What stands in the cells of a row: the words, the label of each and the number of its head (0 for the root)."""

    words: list[str]
    labels: list[str]
    heads: list[int]

    @classmethod
    def of(cls, row: TableRow) -> "TreebankSentence":
        """The sentence of a row that `Treebank` gave."""
        words, labels, heads = (cell.split(SEPARATOR) for cell in row.cells)
        return cls(words, labels, [int(head) for head in heads])


class Treebank(RowTable):
    """A CoNLL-U file (universaldependencies.org/format.html); multiword tokens and empty nodes are left out.

    `label` None leaves all labels UNKNOWN, whatever the file says.
    """

    def __init__(self, path: Path, label: str | None) -> None:
        self._path, self._label, self.name = path, label, str(path)
        _library()

    # the library takes its time, and even the largest treebanks are small enough to be kept
    @cached_property
    def _rows(self) -> list[TableRow]:
        return [_row(block, self._path, self._label) for block in self.blocks()]

    def blocks(self) -> Iterator[list[NumberedLine]]:
        """The lines of each sentence."""
        block: list[NumberedLine] = []
        for line in lines(self._path):
            if line.text.strip():
                block.append(line)
            elif block:
                yield block
                block = []
        if block:
            yield block

    def rows(self) -> Iterator[TableRow]:
        return iter(self._rows)

    def stamp(self) -> list[str | int]:
        return [*stamp_of(self._path), self._label or "", version("conllu")]


def treebank(path: str, label: str | None, cache: Path) -> Treebank:
    """The treebank at `path`, with one kind of label (a key of `LABELS`) or none."""
    place = keep_stdin(cache / "stdin.txt") if path == STDIN else existing_path(path)
    if place.is_dir():
        raise UserError(f"{place}: this is a folder; give a CoNLL-U file or a list of them")
    return Treebank(place, label)


def _library() -> Any:
    try:
        import conllu
    except ImportError:
        raise UserError("reading CoNLL-U needs the `conllu` library: pip install 'manyformer[data]'") from None
    return conllu


def _row(block: list[NumberedLine], path: Path, label: str | None) -> TableRow:
    tokens, name = _parsed(block, path)
    where = f"{path}:{block[0].number}" + (f" (sentence {name})" if name else "")
    text = [line for line in block if not line.text.startswith("#")]
    words = [(line, token) for line, token in zip(text, tokens, strict=True) if isinstance(token.get("id"), int)]
    if not words:
        raise UserError(f"{where}: this sentence has no words")
    for number, (line, word) in enumerate(words, 1):
        if wrong := _wrong(line, word, number, label):
            raise UserError(f"{path}:{line.number}: {wrong}" + (f" (sentence {name})" if name else ""))
    heads = [word["head"] for _, word in words]
    try:
        preorder_columns(heads)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    labels = [_label(word, label) for _, word in words]
    return TableRow(tuple(map(SEPARATOR.join, ([word["form"] for _, word in words], labels, map(str, heads)))), where)


def _label(word: Any, label: str | None) -> str:
    return UNKNOWN if label is None else LABELS[label](word) or UNKNOWN


def _parsed(block: list[NumberedLine], path: Path) -> tuple[list[Any], str]:
    """The lines that are no comments as the library reads them, and the name of the sentence where it has one."""
    conllu = _library()
    try:
        (sentence,) = conllu.parse("\n".join(line.text for line in block), fields=_FIELDS)
    except conllu.exceptions.ParseException as error:
        raise UserError(f"{path}:{_guilty(block)}: this line is not CoNLL-U ({error})") from None
    return list(sentence), sentence.metadata.get("sent_id") or ""


def _guilty(block: list[NumberedLine]) -> int:
    """The number of the first line that the library cannot read."""
    conllu = _library()
    for line in block:
        try:
            conllu.parse(line.text, fields=_FIELDS)
        except conllu.exceptions.ParseException:
            return line.number
    return block[0].number


def _wrong(line: NumberedLine, word: Any, number: int, label: str | None) -> str:
    """What is wrong with a word, in a sentence; empty where nothing is."""
    if (columns := line.text.count(SEPARATOR) + 1) < len(_FIELDS):
        return f"this line has {columns} columns separated by tabs, and CoNLL-U has 10"
    if word["id"] != number:
        return f"word {word['id']} stands where word {number} is due"
    if word["head"] is None:
        return f"word {number} has no head (column 7), and a tree is needed"
    if label is not None and _label(word, label) == UNKNOWN:
        return f"word {number} has no {label}"
    return ""
