"""Running text for language models and masked language models."""

from typing import Annotated, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import (
    DataPaths,
    SplitSpec,
    TokenizedData,
    TokenizerKind,
    register_section,
)
from manyformer.config.section import PathText, PositiveInt


@register_section
class TextData(TokenizedData):
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

    @property
    def row_length(self) -> int:
        return self.length
