"""What tasks use of tokenizers of texts and of images."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from manyformer.two_texts import SpannedTokens


class TextTokenizer(Protocol):
    """A tokenizer, as far as tasks use it."""

    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def pair_separators(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class SourceTokenizer(TextTokenizer, Protocol):
    """A tokenizer that also tells which characters of a text each token stands for."""

    def encode_spans(self, text: str) -> SpannedTokens: ...


class TaskTokenizers(Protocol):
    """The tokenizers of input and output text, and the names of the labels by class id if the task has labels."""

    @property
    def source(self) -> SourceTokenizer: ...
    @property
    def target(self) -> TextTokenizer: ...
    @property
    def labels(self) -> tuple[str, ...] | None: ...


class ImageTokenizer(Protocol):
    """A tokenizer of images, as far as tasks use it; `order` has the raster index of the value of each token."""

    @property
    def bos(self) -> int: ...
    @property
    def order(self) -> NDArray[np.int64]: ...
    def tokens(self, image: NDArray[np.uint8]) -> list[int]: ...
