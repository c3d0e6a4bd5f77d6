"""Reader of CoNLL-U files: the forms, labels and heads of each sentence, and the tokens of its words.

Errors name the line and the sentence."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.data.pipeline.data_paths import data_path
from manyformer.data.text.pair_tables import RowTable
from manyformer.data.text.table_files import TableRow
from manyformer.data.text.text_files import NumberedLine, file_stamp, read_lines
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.structures import preorder_columns

# A character that no cell of a tab-separated file can contain.
CELL_SEPARATOR = "\t"
# The columns up to the relation; "features" has no parser in the library, so that they are not parsed.
_FIELDS = ("id", "form", "lemma", "upos", "xpos", "features", "head", "deprel")
LABEL_READERS: dict[str, Callable[[Any], str | None]] = {
    "relation": lambda word: word["deprel"].partition(":")[0],
    "deprel": lambda word: word["deprel"],
    "upos": lambda word: word["upos"],
    "xpos": lambda word: word["xpos"],
}
LABEL_COLUMNS = {"relation": 7, "deprel": 7, "upos": 3, "xpos": 4}
"""The column of each kind of label, counted from 0."""
SPACE_AFTER = "1"
NO_SPACE_AFTER = "0"
"""The cells of a row that say of a word whether a space follows it."""
_MISC = 9
_NO_SPACE = "SpaceAfter=No"
"""The column of other facts about a word, counted from 0, and the one that says that no space follows it."""
UNKNOWN_LABEL = "_"
"""The label of a word without one."""
NO_WORD = -1
MAX_SENTENCE_WORDS = 4096
"""The longest sentence that is read: several times the longest of known treebanks, and attention is quadratic."""
_MAX_BLOCK_LINES = 4 * MAX_SENTENCE_WORDS
"""The most lines of a sentence, with its comments, multiword tokens and empty nodes."""
_LIMITED_SENTENCES = 1000
"""The most sentences of a part that are read, since the library parses slowly."""


class WordsInText(NamedTuple):
    """Words as they stand in a running text: word i is `text[starts[i] : stops[i]]`."""

    text: str
    starts: list[int]
    stops: list[int]

    @classmethod
    def of_forms(cls, forms: Sequence[str], has_space_after: Sequence[bool]) -> "WordsInText":
        """The words one behind the other, with a space behind those that have one."""
        pieces = []
        starts = []
        stops = []
        length = 0
        for form, has_space in zip(forms, has_space_after, strict=True):
            starts.append(length)
            stops.append(length + len(form))
            pieces.append(form + " " * has_space)
            length += len(pieces[-1])
        return cls("".join(pieces).rstrip(" "), starts, stops)


class WordTokens(NamedTuple):
    """Tokens with the number of the word of each, `NO_WORD` for one behind all words; the first token of every word.

    `is_divided` says that the text was encoded in pieces, since the tokenizer joins words in a token."""

    ids: IntArray
    word_numbers: IntArray
    first: IntArray
    is_divided: bool = False


class TreebankSentence(NamedTuple):
    """The word forms of a sentence, the label of each and the 1-based index of its head (0 for the root).

    `has_space_after` says of each word whether a space follows it in the text."""

    forms: list[str]
    labels: list[str]
    heads: list[int]
    has_space_after: list[bool]

    @classmethod
    def from_row(cls, row: TableRow) -> "TreebankSentence":
        """The sentence stored in a row of a `Treebank`."""
        # a row has text cells only, so that treebanks go the way of all tables
        forms, labels, heads, spaces = (cell.split(CELL_SEPARATOR) for cell in row.cells)
        return cls(forms, labels, [int(head) for head in heads], [space == SPACE_AFTER for space in spaces])

    @property
    def in_text(self) -> WordsInText:
        """The words in the text of the sentence."""
        return WordsInText.of_forms(self.forms, self.has_space_after)

    def tokens(self, tokenizer: Tokenizer, *, in_text: bool) -> WordTokens:
        """The tokens of the words, `in_text` as they stand in the text of the sentence, else each word by itself."""
        if in_text:
            return tokens_in_text(self.in_text, tokenizer)
        return tokens_of_words(self.forms, tokenizer)


class Treebank(RowTable):
    """A CoNLL-U file (universaldependencies.org/format.html) as rows; multiword tokens and empty nodes are skipped.

    With `label` None all labels are `UNKNOWN_LABEL`, whatever the file contains.
    """

    def __init__(self, path: Path, label: str | None) -> None:
        # before the file is read, so that a missing library is named at once
        _import_conllu()
        self._path = path
        self._label = label
        self._sentences: int | None = None
        super().__init__(str(path), lambda _: iter(self._rows), [*file_stamp(path), label or "", version("conllu")])

    # cached, since the library parses slowly and even the largest treebanks fit in memory
    @cached_property
    def _rows(self) -> list[TableRow]:
        blocks = self.blocks()
        rows = [_parse_row(block, self._path, self._label) for block in islice(blocks, self._sentences)]
        self.is_cut_short = next(blocks, None) is not None
        return rows

    def limit(self, records: int, characters: int) -> None:
        self._sentences = min(records, _LIMITED_SENTENCES)

    def blocks(self) -> Iterator[list[NumberedLine]]:
        """Stream the lines of each sentence as one block."""
        block: list[NumberedLine] = []
        for line in read_lines(self._path):
            if line.text.strip():
                block.append(line)
                # checked while the block grows: a file of another format may have no empty line
                if len(block) > _MAX_BLOCK_LINES:
                    raise UserError(
                        f"{self._path}:{block[0].number}: the sentence that begins here has more than "
                        f"{_MAX_BLOCK_LINES:,} lines; an empty line ends a sentence"
                    )
            elif block:
                yield block
                block = []
        if block:
            yield block


def open_treebank(path: str, label: str | None, cache: Path) -> Treebank:
    """The treebank at `path`, with one kind of label (a key of `LABEL_READERS`) or none."""
    resolved = data_path(path, cache)
    if resolved.is_dir():
        raise UserError(f"{resolved}: this is a folder; give a CoNLL-U file or a list of them")
    return Treebank(resolved, label)


def annotated_lines(lines: Iterable[NumberedLine], column: int, labels: Sequence[str]) -> list[str]:
    """The lines of a sentence, with the label of each word in this column."""
    # lines of multiword tokens and of empty nodes, whose ids are no plain numbers, keep their cells
    remaining = iter(labels)
    annotated = []
    for line in lines:
        cells = line.text.split(CELL_SEPARATOR)
        if cells[0].isdecimal():
            cells[column] = next(remaining)
        annotated.append(CELL_SEPARATOR.join(cells))
    return annotated


def tokens_in_text(sentence: WordsInText, tokenizer: Tokenizer) -> WordTokens:
    """The tokens of words in their running text, as the tokenizer encodes it where no token belongs to two words.

    Where one does, the text is encoded in pieces that end between the two."""
    # one piece at first; it is cut wherever a token reaches over two words, until none does
    borders = [0, len(sentence.text)]
    while True:
        pieces = [_encode_piece(sentence, start, stop, tokenizer) for start, stop in pairwise(borders)]
        ids = np.concatenate([piece[0] for piece in pieces])
        first_words = np.concatenate([piece[1] for piece in pieces])
        last_words = np.concatenate([piece[2] for piece in pieces])
        joined = first_words != last_words
        if not joined.any():
            return _with_unknown_words(ids, first_words, len(sentence.starts), tokenizer, is_divided=len(borders) > 2)
        crossed = {
            sentence.stops[word] for a, b in zip(first_words[joined], last_words[joined]) for word in range(a, b)
        }
        borders = sorted({*borders, *crossed})


def tokens_of_words(forms: Sequence[str], tokenizer: Tokenizer) -> WordTokens:
    """The tokens of words that are encoded one by one, for a tokenizer that was learned from words."""
    ids = tokenizer.encode_many(forms)
    return _with_unknown_words(
        np.concatenate(ids), np.repeat(np.arange(len(forms)), list(map(len, ids))), len(forms), tokenizer
    )


def _encode_piece(
    sentence: WordsInText, start: int, stop: int, tokenizer: Tokenizer
) -> tuple[IntArray, IntArray, IntArray]:
    """The tokens of a part of the text, with the first and the last word that each has a character of."""
    tokens = tokenizer.encode_spans(sentence.text[start:stop])
    first = []
    last = []
    for begin, end in zip((tokens.starts + start).tolist(), (tokens.stops + start).tolist()):
        # the first word that ends behind the beginning of the token, and the last that begins before its end
        low = bisect_right(sentence.stops, begin)
        high = bisect_left(sentence.starts, end) - 1
        is_within = begin < end and low <= high
        first.append(low if is_within else NO_WORD)
        last.append(high if is_within else NO_WORD)
    return tokens.ids.astype(np.int64), np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def _with_unknown_words(
    ids: IntArray, word_numbers: IntArray, count: int, tokenizer: Tokenizer, *, is_divided: bool = False
) -> WordTokens:
    """The tokens with an unknown one for each word without any (some tokenizers drop characters)."""
    # each word has a label, so each needs a token to carry it
    missing = np.setdiff1d(np.arange(count), word_numbers)
    # a word belongs behind the tokens of the words before it, and behind spaces that precede those
    if len(word_numbers):
        reached = np.maximum.accumulate(word_numbers)
    else:
        reached = word_numbers
    places = np.searchsorted(reached, missing, side="right")
    ids = np.insert(ids, places, tokenizer.unk)
    word_numbers = np.insert(word_numbers, places, missing)
    # a space belongs to the word behind it, as in tokens that have both
    following = np.where(word_numbers == NO_WORD, count, word_numbers)[::-1]
    word_numbers = np.minimum.accumulate(following)[::-1]
    word_numbers = np.where(word_numbers == count, NO_WORD, word_numbers)
    numbers, first = np.unique(word_numbers, return_index=True)
    return WordTokens(ids, word_numbers, first[numbers != NO_WORD], is_divided)


def _import_conllu() -> Any:
    try:
        import conllu
    except ImportError:
        raise UserError("reading CoNLL-U needs the `conllu` library: pip install 'manyformer[data]'") from None
    return conllu


def _parse_row(block: list[NumberedLine], path: Path, label: str | None) -> TableRow:
    tokens, name = _parse_sentence(block, path)
    location = f"{path}:{block[0].number}" + (f" (sentence {name})" if name else "")
    # the library drops lines that it does not understand, so the counts are compared
    token_lines = [line for line in block if not line.text.startswith("#")]
    if len(token_lines) != len(tokens):
        raise UserError(f"{location}: a line of this sentence is neither a word nor a comment, which begins with #")
    word_lines = [
        (line, token) for line, token in zip(token_lines, tokens, strict=True) if isinstance(token.get("id"), int)
    ]
    if not word_lines:
        raise UserError(f"{location}: this sentence has no words")
    if len(word_lines) > MAX_SENTENCE_WORDS:
        raise UserError(
            f"{location}: this sentence has {len(word_lines):,} words, and at most {MAX_SENTENCE_WORDS:,} are read; "
            "divide it"
        )
    for number, (line, word) in enumerate(word_lines, 1):
        if message := _describe_error(line, word, number, label):
            raise UserError(f"{path}:{line.number}: {message}" + (f" (sentence {name})" if name else ""))
    heads = [word["head"] for _, word in word_lines]
    try:
        # for its errors: a cycle is found here, with its place in the file, and not within training
        preorder_columns(heads)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    labels = [_label_of(word, label) for _, word in word_lines]
    forms = [word["form"] for _, word in word_lines]
    spaces = [SPACE_AFTER if has_space else NO_SPACE_AFTER for has_space in _spaces_after(token_lines, tokens)]
    return TableRow(tuple(map(CELL_SEPARATOR.join, (forms, labels, map(str, heads), spaces))), location)


def _spaces_after(lines: Sequence[NumberedLine], tokens: Sequence[Any]) -> list[bool]:
    """Whether a space follows each word in the text.

    The words of a multiword token have none between them if they are its letters, as "do" and "n't" are of "don't"."""
    spaces = list[bool]()
    forms = list[str]()
    ranges = list[tuple[int, int, str, bool]]()
    for line, token in zip(lines, tokens, strict=True):
        facts = "".join(line.text.split(CELL_SEPARATOR)[_MISC : _MISC + 1]).split("|")
        has_space = _NO_SPACE not in facts
        match token["id"]:
            case int():
                spaces.append(has_space)
                forms.append(token["form"])
            case (first, "-", last):
                ranges.append((first - 1, last, token["form"], has_space))
    for first, stop, form, has_space in ranges:
        # "don't" is "do" and "n't"; French "du" is "de le", whose words stand apart
        is_divided = "".join(forms[first:stop]) == form
        spaces[first:stop] = [not is_divided] * (len(forms[first:stop]) - 1) + [has_space]
    return spaces


def _label_of(word: Any, label: str | None) -> str:
    if label is None:
        return UNKNOWN_LABEL
    return LABEL_READERS[label](word) or UNKNOWN_LABEL


def _parse_sentence(block: list[NumberedLine], path: Path) -> tuple[list[Any], str]:
    """The parsed token lines of a block, and the id of the sentence if it has one, else ""."""
    conllu = _import_conllu()
    try:
        (sentence,) = conllu.parse("\n".join(line.text for line in block), fields=_FIELDS)
    # ValueError: two sentences in one block, or a number of more digits than Python reads
    except (conllu.exceptions.ParseException, ValueError) as error:
        raise UserError(f"{path}:{_first_invalid_line(block)}: this line is not CoNLL-U ({error})") from None
    return list(sentence), sentence.metadata.get("sent_id") or ""


def _first_invalid_line(block: list[NumberedLine]) -> int:
    """The number of the first line that the library cannot parse."""
    conllu = _import_conllu()
    # line by line, since the library names no line of a sentence
    for line in block:
        try:
            conllu.parse(line.text, fields=_FIELDS)
        except (conllu.exceptions.ParseException, ValueError):
            return line.number
    return block[0].number


def _describe_error(line: NumberedLine, word: Any, number: int, label: str | None) -> str:
    """A message about the first defect of a word's line; empty if it is valid."""
    if (columns := line.text.count(CELL_SEPARATOR) + 1) < len(_FIELDS):
        # spaces instead of tabs are the usual reason
        return f"this line has {columns} columns separated by tabs, but CoNLL-U has 10"
    cells = line.text.split(CELL_SEPARATOR)
    if not cells[1].strip(" "):
        return f"word {number} has no form (column 2)"
    # the library also splits at two spaces, and drops white space around a line
    if cells[0] != str(word["id"]) or any("  " in cell for cell in cells[: len(_FIELDS)]):
        return f"word {number} has white space around its number, or two spaces within a cell"
    if word["id"] != number:
        return f"this word has id {word['id']}, but the next id is {number}"
    if word["head"] is None:
        return f"word {number} has no head (column 7), which a tree needs"
    if label is not None and _label_of(word, label) == UNKNOWN_LABEL:
        return f"word {number} has no {label}"
    return ""
