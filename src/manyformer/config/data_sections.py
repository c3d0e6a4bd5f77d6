"""Data sections of a run: text, text pairs, labelled texts, dependency trees, images, or synthetic sequences."""

from typing import Annotated, Any, Literal

from pydantic import Field

from manyformer.config.section import (
    ConfigSection,
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveInt,
    SettingConflict,
    accepted_forms,
)

TokenizerKind = Literal["char", "byte", "bpe"]
WordTokenizerKind = Literal["word", "char", "byte", "bpe"]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
DataPaths = Annotated[
    PathText | Annotated[tuple[PathText, ...], Field(min_length=1)], accepted_forms("a path or a list of paths")
]
PairDataPaths = Annotated[
    PathText | tuple[PathText, PathText], accepted_forms("one path, or a list of two: the source and the target file")
]
SplitSpec = Annotated[
    OpenFraction | PathText | Annotated[tuple[PathText, ...], Field(min_length=1)],
    accepted_forms("a fraction between 0 and 1, a path or a list of paths"),
]
PairSplitSpec = Annotated[
    OpenFraction | PathText | tuple[PathText, PathText],
    accepted_forms("a fraction between 0 and 1, one path, or a list of two: the source and the target file"),
]
BlockSize = Annotated[
    tuple[PositiveInt, PositiveInt], accepted_forms("a list of two: the rows and the columns of a block")
]
ColumnSpec = Annotated[
    Annotated[int, Field(ge=0)] | PathText, accepted_forms("a column's name, or its number counted from 0")
]


class _TokenizedData(ConfigSection):
    """Settings of all tokenized data: its path and its tokenizer."""

    kind: str
    path: DataPaths | PairDataPaths
    tokenizer: WordTokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    vocab: PositiveInt | None = None
    """Size of a bpe vocabulary (char and byte have their own, so it stays null there)."""

    @classmethod
    def default_vocab(cls) -> int:
        """The default size of a bpe vocabulary."""
        return 6000

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        tokenizer = settings.get("tokenizer", cls.model_fields["tokenizer"].default)
        if tokenizer == "bpe" and settings.get("vocab") is None:
            settings["vocab"] = cls.default_vocab()
        return settings

    def conflicts(self) -> list[SettingConflict]:
        if self.tokenizer in ("bpe", "word") or self.vocab is None:
            return []
        message = f"is the size of a bpe vocabulary, and a {self.tokenizer} tokenizer has its own; leave it out or null"
        return [SettingConflict(("vocab",), message, ("data.tokenizer",))]


class TextData(_TokenizedData):
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
    packing: Literal["documents", "concat", "contiguous"] = "documents"
    """`documents`: several documents share a row and cannot attend to each other; `concat`: all documents end to end,
    cut into rows; `contiguous`: each row of a batch continues the same row of the previous batch, for models with a
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

    @classmethod
    def default_vocab(cls) -> int:
        return 2000


class PairsData(_TokenizedData):
    """Pairs of a source and a target text, for translation."""

    kind: Literal["pairs"] = "pairs"
    """Pairs of a source and a target."""
    path: PairDataPaths = "normalization"
    """`normalization` (generated dates and numbers in words, to ISO form), a TSV or JSONL file, a list of two parallel
    files, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    tokenizer: TokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    valid: PairSplitSpec = 0.05
    """Validation data: the fraction of the pairs held out, or a path as above."""
    test: PairDataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path as above."""
    source: ColumnSpec | None = None
    """The column of the source; null means the first column of a TSV and `source` in JSONL and Hugging Face data."""
    target: ColumnSpec | None = None
    """The column of the target; null means the second column of a TSV and `target` in JSONL and Hugging Face data."""
    shared: bool = True
    """One vocabulary for both sides; false trains one for each."""
    max_length: PositiveInt = 128
    """The most tokens on a side: longer pairs are left out of training, and their number is reported."""


class LabelsData(_TokenizedData):
    """Labelled texts, for classification."""

    kind: Literal["labels"] = "labels"
    """Labelled texts."""
    path: DataPaths
    """A TSV or JSONL file, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    tokenizer: TokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    text: ColumnSpec | None = None
    """The column of the text; null means the first column of a TSV and `text` in JSONL and Hugging Face data."""
    label: ColumnSpec | None = None
    """The column of the label; null means the second column of a TSV and `label` in JSONL and Hugging Face data."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the texts held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 256
    """The most tokens in a text: longer texts are truncated at the end, and their number is reported."""


class TreesData(_TokenizedData):
    """Sentences with dependency trees and a label for every word, for taggers."""

    kind: Literal["trees"] = "trees"
    """Sentences with dependency trees."""
    path: DataPaths
    """A CoNLL-U file, `-` (standard input), or a list of these. Each also gzipped."""
    tokenizer: WordTokenizerKind = "word"
    """What a token is: a word, or a character, byte or byte pair of one; all tokens of a word have its position in the
    tree, and the first one has its label."""
    vocab: PositiveInt | None = None
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


class SyntheticData(ConfigSection):
    """Sequences generated by a rule, new ones at every step, for experiments that need a task with a known solution."""

    kind: Literal["synthetic"] = "synthetic"
    """Sequences generated by a rule."""
    rule: Literal["markov", "periodic", "marked", "duplicate", "hops", "addition"] = "markov"
    """The rule. `markov`: each pair of symbols has four possible successors, with probabilities 0.7, 0.15, 0.1, 0.05;
    the best possible loss is 0.914 nats a symbol. `periodic`: `period` random symbols, repeated. `marked`: random
    symbols; one of the first eight is marked and must be predicted at the last eight positions. `duplicate`: a mark and
    a random string, both twice; only the second copy of the string is scored. `hops`: one pointer for each symbol, in
    any order, then questions about the symbol reached from a symbol in 1 to `hops` hops. `addition`: two numbers of up
    to `digits` bits, lowest bit first, at a random offset; each token holds a bit of both, and the bits of their sum
    are scored."""
    symbols: Annotated[int, Field(ge=4)] = 12
    """Size of the alphabet; for `hops` the number of nodes, for `addition` the 4 pairs of bits."""
    length: PositiveInt = 64
    """Tokens in a row."""
    rows_per_sequence: PositiveInt = 1
    """Rows that a sequence is cut into: each row of a batch continues in the next batch until its sequence ends."""
    period: PositiveInt = 24
    """Period of a `periodic` sequence, in symbols."""
    hops: PositiveInt = 3
    """The largest number of hops in a question of `hops`."""
    num_hops: PositiveInt | None = None
    """The number of hops of all questions of `hops`; null means 1 to `hops`."""
    digits: PositiveInt = 16
    """The largest length of the numbers of `addition`, in bits."""
    context: Fraction = 0.0
    """The fraction of a held-out sequence, from its beginning, that is input but not scored."""
    valid: PositiveInt = 65_536
    """Tokens of the validation data, and of the test data, whatever the `length` of a row."""
    seed: NonNegativeInt = 0
    """Decides the rule and the held-out rows; the seed of the run decides the training rows."""

    def conflicts(self) -> list[SettingConflict]:
        if self.rule == "duplicate" and (self.length % 2 or self.length < 4):
            return [
                SettingConflict(
                    ("length",), "must be even, and at least 4, for rows of two equal halves", ("data.rule",)
                )
            ]
        if self.rule == "hops" and self.length <= self.symbols:
            return [
                SettingConflict(
                    ("length",), "must be above data.symbols: all nodes come before the questions", ("data.rule",)
                )
            ]
        if self.rule == "hops" and self.num_hops is not None and self.num_hops > self.hops:
            return [SettingConflict(("num_hops",), "must be at most data.hops", ("data.hops",))]
        if self.rule == "addition" and self.symbols != 4:
            return [SettingConflict(("symbols",), "must be 4: the pairs of two bits", ("data.rule",))]
        if self.rule == "addition" and self.digits > self.length * self.rows_per_sequence:
            return [
                SettingConflict(
                    ("digits",), "must be at most data.length: the numbers are in one row", ("data.length",)
                )
            ]
        return []


class ImagesData(ConfigSection):
    """Images, for image classifiers, or as sequences of brightness levels for language models."""

    kind: Literal["images"] = "images"
    """Images."""
    path: DataPaths
    """A NumPy archive (.npz) with arrays such as train_x and train_y, an IDX file of images as MNIST has them (also
    gzipped; labels are read from the file next to it), a folder of IDX files, a folder of image files in one folder for
    each label, or a list of these."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the images held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path; null means the test images that `path` comes with."""
    size: PositiveInt | None = None
    """Height and width that all images are scaled to; null leaves them as they are."""
    channels: Literal[1, 3] | None = None
    """1 converts all images to grayscale, 3 to RGB; null leaves them as they are."""
    levels: Annotated[int, Field(ge=2, le=256)] = 256
    """Number of brightness levels; for language models, the tokens."""
    block: BlockSize | None = None
    """For language models, rows and columns of the blocks in which images are read: block by block, row by row in each
    block; null reads the image row by row."""


DataConfig = TextData | PairsData | LabelsData | TreesData | ImagesData | SyntheticData


def longest_row(data: DataConfig) -> int:
    """The largest length of a row in tokens, by the settings alone; 1 for images, whose size only the files decide."""
    if isinstance(data, ImagesData):
        return 1
    return data.length if isinstance(data, TextData | SyntheticData) else data.max_length


__all__ = [
    "DataConfig",
    "ImagesData",
    "LabelsData",
    "PairsData",
    "SyntheticData",
    "TextData",
    "TokenizerKind",
    "TreesData",
    "longest_row",
]
