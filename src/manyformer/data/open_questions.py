"""Opening questions about documents: both in one row, with the tokens of the answer, read as batches of like length."""

from collections.abc import Sequence

from manyformer.config import QuestionsData
from manyformer.data.kind import OpenRequest, register
from manyformer.data.opened import UnlabelledData
from manyformer.data.padded_examples import QuestionDataset
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, Splits, path_list
from manyformer.data.table_files import TableRow
from manyformer.data.tabular_text_pipeline import TabularTextPipeline, open_unlabelled, unlabelled_rows
from manyformer.data.token_shards import ShardWriter, TokenShard
from manyformer.errors import UserError
from manyformer.two_texts import (
    DocumentEncoder,
    DocumentTokens,
    FramedTexts,
    answer_text,
    frame_question,
    tokens_of_answer,
)

_WIDENED = "widened to whole tokens, because an end lies inside one"
_BEYOND = "beyond data.max_length, counted as none"
_UNREADABLE = "counted as none, because the tokenizer leaves out every character"


class QuestionsPipeline(TabularTextPipeline[QuestionsData]):
    """Questions about documents for a model that marks the answer."""

    section = QuestionsData
    forms = ("spans",)
    sides = ("tokens", "parts", "ends")
    columns = ("document", "question", "answer")
    texts = 2
    title = "questions"
    noun = "question"
    required_cells = 2

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        if self.data.start is None:
            return super().open_sources(paths, split)
        keys = (self.data.document, self.data.question, self.data.answer, self.data.start)
        names = (*self.columns, "start")
        cache = self.request.cache
        header = self.data.header
        tables = [open_table(path, keys, names, cache, header=header) for path in path_list(paths)]
        return [table.mapped(_answer_last) for table in tables]

    def label_names(self, splits: Splits[RowTable]) -> None:
        return None

    def max_vocab(self) -> int:
        return max(super().max_vocab(), self.data.max_length)

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        encode = DocumentEncoder(self.tokenizers.source)
        limit = self.data.max_length
        lengths = []
        for row in rows:
            document, question = row.cells[:2]
            framed = frame_question(question, document, encode, limit)
            ends = self._answer_ends(row, framed, encode(document))
            for writer, column in zip(writers, (framed.tokens, framed.parts, ends), strict=True):
                writer.add(column, starts_document=True)
            lengths.append(framed.uncut_length)
        return lengths

    def _answer_ends(self, row: TableRow, framed: FramedTexts, document: DocumentTokens) -> list[int]:
        """The columns of the first and the last token of the answer, 0 and 0 where the row has none."""
        characters = answer_characters(row)
        if characters is None:
            return [0, 0]
        touched = tokens_of_answer(document, *characters)
        if touched is None:
            self.note_row("answer", _UNREADABLE, row)
            return [0, 0]
        first, last = (framed.start + token for token in touched)
        if last >= len(framed.tokens) - 1:
            self.note_row("answer", _BEYOND, row)
            return [0, 0]
        start, stop = characters
        marked = answer_text(row.cells[0], document.spans[touched[0]], document.spans[touched[1]])
        if len(marked) > len(row.cells[0][start:stop].strip()):
            self.note_row("answer", _WIDENED, row)
        return [first, last]

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, self.data.max_length, self.data.max_length

    def dataset(self, shards: Sequence[TokenShard]) -> QuestionDataset:
        has_global_question = self.data.global_tokens == "question"
        return QuestionDataset(shards, pad=self.tokenizers.source.pad, has_global_question=has_global_question)


def _answer_last(row: TableRow) -> TableRow:
    """A row of a document, a question, an answer and its place, with the answer, which is the target, as the last."""
    document, question, answer, start = row.cells
    return TableRow((document, question, start, answer), row.location)


def answer_characters(row: TableRow) -> tuple[int, int] | None:
    """The first character of the answer and the one after it, None for an empty answer.

    Raises UserError if the document does not have the answer, or not at its place."""
    document, _, *places, answer = row.cells
    if not answer.strip():
        return None
    if not places:
        start = document.find(answer)
        if start < 0:
            raise UserError(f"{row.location}: the answer {answer[:60]!r} does not occur in the document")
        return start, start + len(answer)
    if not places[0].isdecimal():
        raise UserError(f"{row.location}: the place of the answer must be a number of characters, not {places[0]!r}")
    start = int(places[0])
    if document[start : start + len(answer)] != answer:
        there = document[start : start + len(answer)][:60]
        raise UserError(f"{row.location}: after {start:,} characters of the document is {there!r}, not {answer[:60]!r}")
    return start, start + len(answer)


def unlabelled_questions(
    data: QuestionsData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """The documents and questions in a TSV, CSV or JSONL file; an answer, where there is one, is compared alone."""
    keys = (data.document, data.question, data.answer)
    table = open_unlabelled(path, keys, ("document", "question", "answer"), data, request)
    return unlabelled_rows(table, request, name=lambda row: row.cells[1], texts=2)


QUESTIONS = register(QuestionsPipeline.limited_kind(unlabelled=unlabelled_questions))
