"""Text: its tokenizer, running text, pairs for translation, and tables that an encoder reads.

Tables hold labelled texts, pairs of sentences, questions about documents, or dependency trees."""

from collections.abc import Container, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import (
    SPECIAL_TOKENS,
    ColumnSpec,
    DataPaths,
    DataSection,
    ExpectedData,
    HeaderSpec,
    PairDataPaths,
    PairSplitSpec,
    SplitSpec,
    register_section,
)
from manyformer.config.section import PathText, PositiveInt, SettingConflict

TokenizerKind = Literal["char", "byte", "bpe"]
WordTokenizerKind = Literal["word", "char", "byte", "bpe"]

VocabSize = Annotated[PositiveInt, Field(le=1_000_000)]
"""The size of a vocabulary that is learnt: several times that of the largest in use; more would fill the memory."""

ASSUMED_CHARACTERS = 256
"""The assumed vocabulary size of a character model, unknown until the data is read."""

ASSUMED_WORDS = 10_000
"""The assumed vocabulary size of a word model, unknown until the data is read."""


class TokenizedData(DataSection):
    """Settings of all tokenized data: its path and its tokenizer."""

    path: DataPaths | PairDataPaths
    tokenizer: TokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    vocab: VocabSize | None = None
    """Size of a bpe vocabulary (char and byte have their own, so it stays null there)."""

    default_vocab: ClassVar[int] = 6000
    """The default size of a bpe vocabulary."""

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        tokenizer = settings.get("tokenizer", cls.model_fields["tokenizer"].default)
        if tokenizer == "bpe" and settings.get("vocab") is None:
            settings["vocab"] = cls.default_vocab
        return settings

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.tokenizer in ("char", "byte") and self.vocab is not None:
            reason = f"and a {self.tokenizer} tokenizer has its own; leave it out or null"
            yield SettingConflict(("vocab",), f"is the size of a bpe vocabulary, {reason}", ("data.tokenizer",))

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        expected = super().expected_keywords(parameters)
        vocab, assumption = self._expected_vocab()
        return expected._replace(keywords=expected.keywords | {"vocab": vocab}, assumption=assumption)

    def _expected_vocab(self) -> tuple[int, str]:
        if self.tokenizer == "byte":
            return 256 + SPECIAL_TOKENS, "bytes"
        if self.vocab is not None:
            return self.vocab, f"vocabulary {self.vocab}, or less where the text is short"
        return ASSUMED_CHARACTERS, f"as if there were {ASSUMED_CHARACTERS} different characters; the data decides"


class EncodedTextData(TokenizedData):
    """Settings of texts whose tokenizer may be that of an earlier run."""

    tokenizer_of: PathText | None = None
    """A run or a saved model whose tokenizer encodes the data, in a comparison also the case that is `init_from`; null
    is the one of `init_from` unless `tokenizer` or `vocab` is set, and else trains one."""

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        # the vocabulary is that of the other run, which a default would contradict
        if settings.get("tokenizer_of") is not None:
            return settings
        return super().fill(settings)

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        if self.tokenizer_of is None:
            return
        if self.tokenizer != type(self).model_fields["tokenizer"].default:
            yield SettingConflict(("tokenizer",), "is another than that of a run; leave it out", ("data.tokenizer_of",))
        if self.vocab is not None:
            message = "is the size of a vocabulary to train, and that of a run is used; leave it out or null"
            yield SettingConflict(("vocab",), message, ("data.tokenizer_of",))

    def _expected_vocab(self) -> tuple[int, str]:
        if self.tokenizer_of is None:
            return super()._expected_vocab()
        return self.default_vocab, f"as if the vocabulary of {self.tokenizer_of} were {self.default_vocab:,}"


@register_section
class TextData(EncodedTextData):
    """Running text, for language models and masked language models."""

    kind: Literal["text"] = "text"
    """Running text."""
    path: DataPaths = "stdlib"
    """`stdlib` (the source of this Python's standard library), a file, a folder, `-` (standard input), a list of these,
    or `hf:NAME` (a Hugging Face data set). Text or JSONL, each also gzipped."""
    tokenizer: TokenizerKind = "byte"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    length: PositiveInt = 256
    """Tokens in a row."""
    packing: Literal["documents", "concat", "random", "contiguous"] = "documents"
    """`documents`: several documents share a row and cannot attend to each other; `concat`: all documents end to end,
    cut into rows; `random`: the same, but each row of training begins at a random token, drawn anew in each epoch;
    `contiguous`: each row of a batch continues the same row of the previous batch, for models with a
    memory."""
    valid: SplitSpec = 0.05
    """Validation data: the fraction of the documents held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    column: PathText | None = None
    """The field that holds the text in JSONL and Hugging Face data; null means `text`."""
    neighbours: PathText | None = None
    """Only for language models that use precomputed neighbours (spalm): the folder that
    `manyformer datastore neighbours` has written for this text."""
    masking: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Only for masked language models: the fraction of the tokens that are predicted (BERT, section 3.1)."""
    text_parts: Literal["equal", "sentences"] = "equal"
    """Only for masked language models with parts (etc): parts of equal length, as the model says, or the sentences of
    the text, which end after . ! ? and at an empty line (ETC, section on pre-training)."""

    default_vocab: ClassVar[int] = 2000
    swept: ClassVar[tuple[str, ...]] = ("length", "packing", "masking")
    fills_rows: ClassVar[bool] = True


@register_section
class PairsData(EncodedTextData):
    """Pairs of a source and a target text, for translation."""

    kind: Literal["pairs"] = "pairs"
    """Pairs of a source and a target."""
    path: PairDataPaths = "normalization"
    """`normalization` (generated dates and numbers in words, to ISO form), a TSV, CSV or JSONL file, a list of two
    parallel files, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    valid: PairSplitSpec = 0.05
    """Validation data: the fraction of the pairs held out, or a path as above."""
    test: PairDataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path as above."""
    header: HeaderSpec = None
    source: ColumnSpec | None = None
    """The column of the source; null means the first column of a TSV or CSV without a header, and `source`
    elsewhere."""
    target: ColumnSpec | None = None
    """The column of the target; null means the second column of a TSV or CSV without a header, and `target`
    elsewhere."""
    shared: bool = True
    """One vocabulary for both sides; false trains one for each."""
    max_length: PositiveInt = 128
    """The most tokens on a side: longer pairs are left out of training, and their number is reported."""


class TabularTextData(EncodedTextData):
    """Settings of tables whose rows are an example each."""

    path: DataPaths
    """A TSV, CSV or JSONL file, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    header: HeaderSpec = None
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the rows held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 256
    """The most tokens in a row: longer texts are truncated at the end, and their number is reported."""


@register_section
class LabelsData(TabularTextData):
    """Labelled texts, for classification."""

    kind: Literal["labels"] = "labels"
    """Labelled texts."""
    text: ColumnSpec | None = None
    """The column of the text; null means the first column of a TSV or CSV without a header, and `text` elsewhere."""
    label: ColumnSpec | None = None
    """The column of the label; null means the second column of a TSV or CSV without a header, and `label` elsewhere."""


@register_section
class SentencePairsData(TabularTextData):
    """Labelled pairs of sentences, for encoders."""

    kind: Literal["sentence-pairs"] = "sentence-pairs"
    """Labelled pairs of sentences."""
    first: ColumnSpec | None = None
    """The column of the first sentence; null means the first column of a TSV or CSV without a header, and `first`
    elsewhere."""
    second: ColumnSpec | None = None
    """The column of the second sentence; null means the second column of a TSV or CSV without a header, and `second`
    elsewhere."""
    label: ColumnSpec | None = None
    """The column of the label; null means the third column of a TSV or CSV without a header, and `label` elsewhere."""


@register_section
class QuestionsData(TabularTextData):
    """Questions about documents, answered by a span of the document or not at all, for encoders."""

    kind: Literal["questions"] = "questions"
    """Questions about documents."""
    document: ColumnSpec | None = None
    """The column of the document; null means the first column of a TSV or CSV without a header, and `document`
    elsewhere. Rows of one document are in one split."""
    question: ColumnSpec | None = None
    """The column of the question; null means the second column of a TSV or CSV without a header, and `question`
    elsewhere."""
    answer: ColumnSpec | None = None
    """The column of the answer, which is empty if the document has none; null means the third column of a TSV or CSV
    without a header, and `answer` elsewhere."""
    start: ColumnSpec | None = None
    """The column with the number of characters before the answer; null means the first place where it occurs."""
    global_tokens: Literal["question", "none"] = "question"
    """Which tokens have the global role, for models with one (longformer, etc): those of the question (Longformer,
    section 3.1), or none."""
    max_length: PositiveInt = 1024
    """The most tokens in a row of a question and a document, which is truncated at the end: answers there are lost, and
    the number of such rows is reported."""


@register_section
class TreesData(EncodedTextData):
    """Sentences with dependency trees and a label for every word, for taggers."""

    kind: Literal["trees"] = "trees"
    """Sentences with dependency trees."""
    path: DataPaths
    """A CoNLL-U file, `-` (standard input), or a list of these. Each also gzipped."""
    tokenizer: WordTokenizerKind = "word"  # type: ignore[assignment]
    """What a token is: a word, or a character, byte or byte pair of one; all tokens of a word have its position in the
    tree, and the first one has its label."""
    vocab: VocabSize | None = None
    """Size of a vocabulary of words or byte pairs; null for words means all words that occur at least twice."""
    label: Literal["relation", "deprel", "upos", "xpos"] = "relation"
    """The label of every word: its relation to its head without or with subtypes (relation, deprel), or its universal
    or language-specific part of speech (upos, xpos)."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the sentences held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 128
    """The most tokens in a sentence: longer sentences are left out of training, and their number is reported."""

    def _expected_vocab(self) -> tuple[int, str]:
        if self.tokenizer == "word" and self.vocab is None and self.tokenizer_of is None:
            return ASSUMED_WORDS, f"as if there were {ASSUMED_WORDS:,} different words; the data decides"
        return super()._expected_vocab()
