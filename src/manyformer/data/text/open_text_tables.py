"""Opening tables of texts: pairs, labelled texts, pairs of sentences, and questions about documents.

Tables are split, tokenized into shards once, and read as batches of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, tee

import numpy as np

from manyformer.base.errors import UserError
from manyformer.config import LabelsData, PairsData, QuestionsData, SentencePairsData
from manyformer.data.batching.length_buckets import (
    LabelledDataset,
    LengthBuckets,
    PairDataset,
    QuestionDataset,
    SentencePairDataset,
)
from manyformer.data.pipeline.data_paths import NORMALIZATION_CORPUS, STDIN, data_path, stdin_lines
from manyformer.data.pipeline.kind import OpenRequest, register
from manyformer.data.pipeline.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    UnlabelledData,
    UnlabelledInput,
    path_name,
    read_examples,
)
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.summary import TableFindings
from manyformer.data.pipeline.table_pipeline import (
    TablePipeline,
    TabularTextPipeline,
    examples_of_rows,
    is_table,
    open_unlabelled,
    training_rows,
    unlabelled_rows,
)
from manyformer.data.storage.token_shards import ShardWriter, TokenShard, shard_units
from manyformer.data.text.pair_tables import RowTable, open_table
from manyformer.data.text.table_files import TableRow
from manyformer.data.text.text_files import read_lines
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, borrowed_tokenizers, class_id, train_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import TextUnits
from manyformer.nn.batches.two_texts import (
    DocumentEncoder,
    DocumentTokens,
    FramedTexts,
    answer_text,
    frame_pair,
    frame_question,
    tokens_of_answer,
)

# The share of the default corpus that is held out for testing, besides validation.
_TEST_SHARE = 0.02
_WIDENED = "widened to whole tokens, because an end lies inside one"
_BEYOND = "beyond data.max_length, counted as none"
_UNREADABLE = "counted as none, because the tokenizer leaves out every character"


class PairsPipeline(TablePipeline[PairsData]):
    """Pairs for an encoder-decoder; a batch is bounded by the padded tokens of the longer side."""

    section = PairsData
    forms = ("pairs",)
    sides = ("source", "target")
    prepared_settings = ("tokenizer", "vocab", "shared")
    title = "pairs"
    noun = "pair"
    unit = "tokens on a side"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        keys = (self.data.source, self.data.target)
        return [open_table(paths, keys, self.sides, self.request.cache, header=self.data.header)]

    def split(self) -> Splits[RowTable]:
        splits = super().split()
        if self.data.test is None and self.data.path == NORMALIZATION_CORPUS:
            # the default corpus is generated in one piece, so its test data is held out like its validation data
            splits.shares["test"] = min(_TEST_SHARE, (1 - sum(splits.shares.values())) / 2)
        return splits

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        data = self.data
        if data.tokenizer_of is not None:
            return _borrowed_pair(data.tokenizer_of, is_shared=data.shared)
        if data.shared:
            texts = chain.from_iterable(row.cells for row in training_rows(splits))
            tokenizer = train_tokenizer(data.tokenizer, texts, data.vocab)
            return TokenizerPair(tokenizer, tokenizer)

        # each side in a pass of its own: rows are streamed, and a tokenizer reads its texts once
        def train(side: int) -> Tokenizer:
            return train_tokenizer(data.tokenizer, (row.cells[side] for row in training_rows(splits)), data.vocab)

        return TokenizerPair(train(0), train(1))

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        source, target = ([row.cells[side] for row in rows] for side in (0, 1))
        source_ids = self.tokenizers.source.encode_many(source)
        target_ids = self.tokenizers.target.encode_many(target)
        for text, ids in zip(source, source_ids, strict=True):
            writers[0].add(np.append(ids, self.tokenizers.source.eos), starts_document=True, text=text)
        bos = self.tokenizers.target.bos
        eos = self.tokenizers.target.eos
        for text, ids in zip(target, target_ids, strict=True):
            writers[1].add(np.concatenate([[bos], ids, [eos]]), starts_document=True, text=text)
        return [max(len(first) + 1, len(second) + 1) for first, second in zip(source_ids, target_ids, strict=True)]

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, self.tokenizers.target.vocab

    def dataset(self, shards: Sequence[TokenShard]) -> PairDataset:
        return PairDataset(*shards, tokenizers=self.tokenizers)

    def units(self, shards: Sequence[TokenShard]) -> TextUnits:
        return shard_units(shards[1])

    def text(self, shards: Sequence[TokenShard]) -> TokenShard:
        return shards[0]

    def required_keywords(self) -> dict[str, int]:
        keywords = super().required_keywords()
        if self.data.shared:
            return keywords
        return {**keywords, "source_vocab": self.tokenizers.source.vocab}

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        rows = self.rows_of_file(path)
        return self.evaluation_data(path_name(path), self.write_rows(rows))._replace(examples=examples_of_rows(rows))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "leave such pairs out with data.max_length, or build a longer model"
        yield LengthLimit(plans["train"].max_length, "the longest training pair", remedy)
        for name, plan in plans.items():
            if name != "train":
                # held-out rows are saved in the order of the shard, so the index finds the longest one
                index = int(plan.examples.lengths.argmax())
                example = next(islice(read_examples(self.request.cache, name), index, None))
                remedy = "no held-out pair is left out: build a longer model or shorten the text"
                yield LengthLimit(plan.max_length, f"the longest {name} pair ({example.location})", remedy)

    def vocab_text(self) -> str:
        size = super().vocab_text()
        if self.data.shared:
            return f"{size}, shared by both sides"
        return f"{self.tokenizers.source.vocab:,} (source) and {size} (target)"


def _borrowed_pair(run: str, *, is_shared: bool) -> TokenizerPair:
    """The tokenizers of both sides of a run or a saved model. Raises UserError where two are one or one is two."""
    source, target, _ = borrowed_tokenizers(run)
    # the tokenizers of an imported model differ in the special tokens around a text alone
    vocabularies = [side.content().get("tokenizers", side.content()) for side in (source, target)]
    if is_shared != (vocabularies[0] == vocabularies[1]):
        state, needed = ("two vocabularies", "false") if is_shared else ("one vocabulary for both sides", "true")
        raise UserError(f"data.tokenizer_of: {run} has {state}, so data.shared must be {needed}")
    return TokenizerPair(source, target)


class LabelsPipeline(TabularTextPipeline[LabelsData]):
    """Labelled texts for a classifier."""

    section = LabelsData
    forms = ("labelled",)
    sides = columns = ("text", "label")
    texts = 1
    title = "texts"
    noun = "text"

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        tokenizer = self.tokenizers.source
        class_ids = self.tokenizers.class_ids()
        # start and end token count, and are never cut off
        limit = max(0, self.data.max_length - 2)
        texts = [row.cells[0] for row in rows]
        token_ids = tokenizer.encode_many(texts)
        for text, ids in zip(texts, token_ids, strict=True):
            framed_ids = np.concatenate([[tokenizer.bos], ids[:limit], [tokenizer.eos]])
            writers[0].add(framed_ids, starts_document=True, text=text)
        for row in rows:
            writers[1].add([class_id(class_ids, row.cells[1], row.location)], starts_document=True)
        return [len(ids) + 2 for ids in token_ids]

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, len(self.tokenizers.labels or ())

    def dataset(self, shards: Sequence[TokenShard]) -> LabelledDataset:
        return LabelledDataset(*shards, pad=self.tokenizers.source.pad)


def unlabelled_texts(data: LabelsData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The texts of a table, by the reader of training, or the lines of a text file or of standard input ("-").

    A label, where a table has one, is compared alone. A line with tabs is a row of a table if one of its cells is a
    label of the model, at the place of the label."""
    if is_table(path):
        table = open_unlabelled(path, (data.text, data.label), ("text", "label"), data, request)
        return unlabelled_rows(table, request, name=lambda row: row.cells[0], labels=tokenizers.labels)
    if path == STDIN:
        return _labelled_or_plain(stdin_lines(), data, tokenizers, "standard input", request)
    resolved = data_path(path, request.cache)
    lines = (line.text for line in read_lines(resolved))
    return _labelled_or_plain(lines, data, tokenizers, str(resolved), request)


def _labelled_or_plain(
    lines: Iterator[str], data: LabelsData, tokenizers: TokenizerPair, name: str, request: OpenRequest
) -> UnlabelledData:
    """Lines as texts, or as texts and labels between tabs if the first line has a label of the model at its place."""
    text_column, label_column = (
        number if not isinstance(key, int) else key for number, key in enumerate((data.text, data.label))
    )
    # the first line alone decides: a pipe cannot be read twice
    first = next(lines, None)
    # a tab may be part of a text, so the cell behind it must be a label of the model
    cells = [] if first is None else first.split("\t")
    if max(text_column, label_column) >= len(cells) or cells[label_column] not in (tokenizers.labels or ()):
        texts, names = tee(() if first is None else chain([first], lines))
        # generators: lines of a pipe are labelled as they arrive
        return UnlabelledData((UnlabelledInput(text) for text in names), texts=texts)
    request.log(
        f"{name}: read as a table, since the first line has the label {cells[label_column]!r} after a tab; "
        "labels are compared, and are no part of the texts"
    )
    assert first is not None

    def rows(findings: TableFindings) -> Iterator[TableRow]:
        for number, line in enumerate(chain([first], lines), start=1):
            cells = line.split("\t")
            if not line.strip():
                findings.blank.add(f"{name}:{number}")
                continue
            if max(text_column, label_column) >= len(cells):
                raise UserError(f"{name}:{number}: this line has no label after a tab, as the first line has")
            yield TableRow((cells[text_column], cells[label_column]), f"{name}:{number}")

    return unlabelled_rows(RowTable(name, rows, []), request, name=lambda row: row.cells[0])


class SentencePairsPipeline(TabularTextPipeline[SentencePairsData]):
    """Pairs of sentences for a classifier."""

    section = SentencePairsData
    forms = ("labelled",)
    sides = ("tokens", "parts", "classes")
    columns = ("first", "second", "label")
    texts = 2
    title = "sentence pairs"
    noun = "pair"

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        tokenizer = self.tokenizers.source
        class_ids = self.tokenizers.class_ids()
        lengths = []
        first_ids, second_ids = (tokenizer.encode_many([row.cells[side] for row in rows]) for side in (0, 1))
        for row, first, second in zip(rows, first_ids, second_ids, strict=True):
            framed = frame_pair(list(first), list(second), tokenizer, self.data.max_length)
            columns = (framed.tokens, framed.parts, [class_id(class_ids, row.cells[2], row.location)])
            for writer, column in zip(writers, columns, strict=True):
                writer.add(column, starts_document=True)
            lengths.append(framed.uncut_length)
        return lengths

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, 2, len(self.tokenizers.labels or ())

    def dataset(self, shards: Sequence[TokenShard]) -> SentencePairDataset:
        return SentencePairDataset(*shards, pad=self.tokenizers.source.pad)


def unlabelled_pairs(
    data: SentencePairsData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """The pairs in a TSV, CSV or JSONL file; a label, where there is one, is compared alone."""
    keys = (data.first, data.second, data.label)
    table = open_unlabelled(path, keys, ("first", "second", "label"), data, request)
    return unlabelled_rows(table, request, name=lambda row: "\t".join(row.cells[:2]), texts=2)


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
        # the shard of ends holds columns, not tokens
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
        # column 0 is the start token, which stands for "no answer"
        if characters is None:
            return [0, 0]
        touched = tokens_of_answer(document, *characters)
        # some tokenizers drop characters, such as accents or unknown scripts
        if touched is None:
            self.note_row("answer", _UNREADABLE, row)
            return [0, 0]
        first, last = (framed.start + token for token in touched)
        # the document was cut before the end of the answer
        if last >= len(framed.tokens) - 1:
            self.note_row("answer", _BEYOND, row)
            return [0, 0]
        start, stop = characters
        # tokens may reach beyond the answer, and the model can only mark whole ones
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
    # held-out rows end with their target, as those of all tables do
    document, question, answer, start = row.cells
    return TableRow((document, question, start, answer), row.location)


def answer_characters(row: TableRow) -> tuple[int, int] | None:
    """The first character of the answer and the one after it, None for an empty answer.

    Raises UserError if the document does not have the answer, or not at its place."""
    document, _, *places, answer = row.cells
    if not answer.strip():
        return None
    if not places:
        # without a place the first occurrence is meant
        start = document.find(answer)
        if start < 0:
            raise UserError(f"{row.location}: the answer {answer[:60]!r} does not occur in the document")
        return start, start + len(answer)
    if not places[0].isdecimal():
        raise UserError(f"{row.location}: the place of the answer must be a number of characters, not {places[0]!r}")
    start = int(places[0])
    if document[start : start + len(answer)] != answer:
        actual = document[start : start + len(answer)][:60]
        raise UserError(
            f"{row.location}: after {start:,} characters of the document is {actual!r}, not {answer[:60]!r}"
        )
    return start, start + len(answer)


def unlabelled_questions(
    data: QuestionsData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """The documents and questions in a TSV, CSV or JSONL file; an answer, where there is one, is compared alone."""
    keys = (data.document, data.question, data.answer)
    table = open_unlabelled(path, keys, ("document", "question", "answer"), data, request)
    return unlabelled_rows(table, request, name=lambda row: row.cells[1], texts=2)


PAIRS = register(PairsPipeline.limited_kind())
LABELS = register(LabelsPipeline.limited_kind(unlabelled=unlabelled_texts))
PAIRS_OF_SENTENCES = register(SentencePairsPipeline.limited_kind(unlabelled=unlabelled_pairs))
QUESTIONS = register(QuestionsPipeline.limited_kind(unlabelled=unlabelled_questions))
