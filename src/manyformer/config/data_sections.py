"""What a run learns from: text, pairs of texts, labelled texts, trees, images, or rules that make sequences."""

from typing import Annotated, Any, Literal

from pydantic import Field

from manyformer.config.section import (
    ConfigSection,
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveInt,
    SettingConflict,
    one_of_forms,
)

TokenizerKind = Literal["char", "byte", "bpe"]
WordTokenizerKind = Literal["word", "char", "byte", "bpe"]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
DataPaths = Annotated[
    PathText | Annotated[tuple[PathText, ...], Field(min_length=1)], one_of_forms("a path or a list of paths")
]
PairDataPaths = Annotated[
    PathText | tuple[PathText, PathText], one_of_forms("one path, or a list of two: the source and the target file")
]
SplitSpec = Annotated[
    OpenFraction | PathText | Annotated[tuple[PathText, ...], Field(min_length=1)],
    one_of_forms("a fraction between 0 and 1, a path or a list of paths"),
]
PairSplitSpec = Annotated[
    OpenFraction | PathText | tuple[PathText, PathText],
    one_of_forms("a fraction between 0 and 1, one path, or a list of two: the source and the target file"),
]
BlockSize = Annotated[
    tuple[PositiveInt, PositiveInt], one_of_forms("a list of two: the rows and the columns of a block")
]
ColumnSpec = Annotated[
    Annotated[int, Field(ge=0)] | PathText, one_of_forms("a column's name, or its number counted from 0")
]


class _Tokenized(ConfigSection):
    """What every kind of data has: where it is, and its tokens."""

    kind: str
    path: DataPaths | PairDataPaths
    tokenizer: WordTokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    vocab: PositiveInt | None = None
    """Size of a bpe vocabulary (char and byte have their own, so it stays null there)."""

    @classmethod
    def usual_vocab(cls) -> int:
        """The size that a bpe vocabulary gets when none is given."""
        return 6000

    @classmethod
    def fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        tokenizer = given.get("tokenizer", cls.model_fields["tokenizer"].default)
        if tokenizer == "bpe" and given.get("vocab") is None:
            given["vocab"] = cls.usual_vocab()
        return given

    def conflicts(self) -> list[SettingConflict]:
        if self.tokenizer in ("bpe", "word") or self.vocab is None:
            return []
        what = f"is the size of a bpe vocabulary, and a {self.tokenizer} tokenizer has its own; leave it out or null"
        return [SettingConflict(("vocab",), what, ("data.tokenizer",))]


class TextData(_Tokenized):
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
    packing: Literal["documents", "stream", "lanes"] = "documents"
    """`documents`: several documents share a row and cannot see each other; `stream`: all end to end, cut in rows;
    `lanes`: each row of a batch goes on where it ended in the batch before, for models with a memory."""
    valid: SplitSpec = 0.05
    """Validation data: the fraction of the documents held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    column: PathText | None = None
    """The field that holds the text in JSONL and Hugging Face data; null means `text`."""
    neighbours: PathText | None = None
    """Language models that look things up (spalm) only: the folder in which `manyformer datastore neighbours` put what
    it found for this text."""
    masking: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Masked language models only: the fraction of the tokens to be predicted (BERT, section 3.1)."""

    @classmethod
    def usual_vocab(cls) -> int:
        return 2000


class PairsData(_Tokenized):
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
    """Tokens on a side: longer pairs are left out of training, and counted."""


class LabelsData(_Tokenized):
    """Texts with a label each, for classification."""

    kind: Literal["labels"] = "labels"
    """Texts with a label each."""
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
    """Tokens in a text: a longer one is cut at its end, and counted."""


class TreesData(_Tokenized):
    """Sentences with a dependency tree each and a label for every word, for taggers."""

    kind: Literal["trees"] = "trees"
    """Sentences with trees."""
    path: DataPaths
    """A CoNLL-U file, `-` (standard input), or a list of these. Each also gzipped."""
    tokenizer: WordTokenizerKind = "word"
    """What a token is: a whole word, or one of its characters, bytes or byte pairs, all of which have its place in the
    tree; the first one has its label."""
    vocab: PositiveInt | None = None
    """Size of a vocabulary of words or byte pairs; null for words means all that occur twice or more."""
    label: Literal["relation", "deprel", "upos", "xpos"] = "relation"
    """What is to be told of every word: its relation to its head without subtypes or with them (deprel), or its part of
    speech, universal or of the language (xpos)."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the sentences held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 128
    """Tokens in a sentence: longer ones are left out of training, and counted."""


class SyntheticData(ConfigSection):
    """Sequences made by a rule, always new ones, for questions that need a task whose answer is known."""

    kind: Literal["synthetic"] = "synthetic"
    """Sequences made by a rule."""
    task: Literal["markov", "periodic", "marked", "duplicate", "hops", "addition"] = "markov"
    """The rule. `markov`: every two symbols have four successors of their own, with probabilities 0.7, 0.15, 0.1, 0.05;
    who knows them pays 0.914 nats a symbol. `periodic`: `period` random symbols again and again. `marked`: random
    symbols, one of the first eight of which is marked and asked for in the last eight places. `duplicate`: a mark and a
    random word, both twice; the second word is scored, and follows from the first. `hops`: as many nodes as symbols, in
    any order, each pointing at one; then questions where one gets from a node in 1 to `hops` hops. `addition`: two
    numbers of up to `digits` bits, the lowest first, somewhere in the row; each place shows both bits, and the bit of
    their sum is scored."""
    symbols: Annotated[int, Field(ge=4)] = 12
    """Symbols of the alphabet; the nodes of `hops`, the 4 pairs of bits of `addition`."""
    length: PositiveInt = 64
    """Tokens in a row."""
    parts: PositiveInt = 1
    """Rows that a sequence is cut into: each row of a batch goes on in the next batch until its sequence ends."""
    period: PositiveInt = 24
    """Symbols until a `periodic` sequence comes again."""
    hops: PositiveInt = 3
    """The farthest that is asked for in `hops`."""
    asked: PositiveInt | None = None
    """Questions of `hops` are all of so many hops; null means of any."""
    digits: PositiveInt = 16
    """The length of the numbers of `addition`."""
    context: Fraction = 0.0
    """The share of a held-out sequence, from its beginning, that is read but not scored."""
    valid: PositiveInt = 65_536
    """Tokens of validation data, and as many of test data: fewer but longer rows where `length` is greater."""
    seed: NonNegativeInt = 0
    """Decides the rule and the held-out rows; the seed of the run decides the rows that it learns from."""

    def conflicts(self) -> list[SettingConflict]:
        if self.task == "duplicate" and (self.length % 2 or self.length < 4):
            return [
                SettingConflict(
                    ("length",), "must be even, and at least 4, for rows of two equal halves", ("data.task",)
                )
            ]
        if self.task == "hops" and self.length <= self.symbols:
            return [
                SettingConflict(
                    ("length",), "must be above data.symbols: all nodes come before the questions", ("data.task",)
                )
            ]
        if self.task == "hops" and self.asked is not None and self.asked > self.hops:
            return [SettingConflict(("asked",), "must be at most data.hops", ("data.hops",))]
        if self.task == "addition" and self.symbols != 4:
            return [SettingConflict(("symbols",), "must be 4: the pairs of two bits", ("data.task",))]
        if self.task == "addition" and self.digits > self.length * self.parts:
            return [
                SettingConflict(
                    ("digits",), "must be at most data.length: the numbers stand in a row", ("data.length",)
                )
            ]
        return []


class ImagesData(ConfigSection):
    """Images, for classifiers of images, or as sequences of levels of brightness for language models."""

    kind: Literal["images"] = "images"
    """Images."""
    path: DataPaths
    """A NumPy archive (.npz) with arrays such as train_x and train_y, an IDX file of images as MNIST has them (also
    gzipped; labels are found beside it), a folder of IDX files, a folder of image files whose folders are their labels,
    or a list of these."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the images held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path; null means the test images that `path` comes with."""
    size: PositiveInt | None = None
    """Height and width that all images are scaled to; null leaves them as they are."""
    channels: Literal[1, 3] | None = None
    """1 makes all images grey, 3 gives all three colours; null leaves them as they are."""
    levels: Annotated[int, Field(ge=2, le=256)] = 256
    """Levels of brightness that are told apart; for language models, the tokens."""
    block: BlockSize | None = None
    """For language models, rows and columns of the blocks that images are read in: one block after the other, row by
    row within each; null reads the whole image row by row."""


DataConfig = TextData | PairsData | LabelsData | TreesData | ImagesData | SyntheticData


def longest_row(data: DataConfig) -> int:
    """How many tokens a row has at most, by the settings alone; 1 for images, whose size the files tell."""
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
