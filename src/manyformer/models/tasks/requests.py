"""What tasks are given and what they return: tokenizers, passes for display, requests of evaluation and prediction."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from manyformer.base.context_windows import ContextWindows
from manyformer.models import Model
from manyformer.models.scores import ScoreRecord
from manyformer.nn.batches import Batch, TextUnits
from manyformer.nn.batches.two_texts import SpannedTokens
from manyformer.nn.core import WatchFn


@runtime_checkable
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


class EncodedText(NamedTuple):
    """The token ids of a text without special tokens, the tokenizer, and a function that labels tokens for display.

    `answer` is the text that a model of a task with a source writes.
    """

    ids: list[int]
    tokenizer: TextTokenizer
    labels_of: Callable[[Sequence[int]], tuple[str, ...]]
    answer: "EncodedText | None" = None


class TextPass(NamedTuple):
    """One pass of a model over the tokens of a text, which reports what it computes to a `watch` callback.

    `labels` are those of its tokens. Reported tensors have `length` columns of tokens, of which those beyond the labels
    are padding. A pass that attends to a source has the labels of the source, and those of the tokens that are
    predicted at each step. `tokens` and `source_tokens` are the ids, without padding.
    `remembered_labels` are those of the tokens before, which the model may have in its memory.
    """

    run: Callable[[WatchFn], object]
    labels: tuple[str, ...]
    length: int
    predicted_labels: tuple[str, ...] = ()
    source_labels: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    source_tokens: tuple[int, ...] = ()
    remembered_labels: tuple[str, ...] = ()


class ImagePass(NamedTuple):
    """One pass of a model over an image: `corners` has the row and column of the upper left pixel of each token.

    A token covers `size` x `size` pixels; the corner of one that covers none, such as a class token, is None.
    """

    tokens: TextPass
    corners: tuple[tuple[int, int] | None, ...]
    size: int


M = TypeVar("M", bound=Model, default=Any)
"""The model class of a task."""


class ScoredBatches(Protocol):
    """Held-out batches; `units` are those of the text that the targets encode, None if they encode none."""

    @property
    def units(self) -> TextUnits | None: ...
    @property
    def rows_continue(self) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Example(Protocol):
    """A held-out pair, or a text and its label, as strings; `more` are texts between the two."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def more(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation: how texts are searched for and compared; `tokenize` and `lowercase` are sacrebleu's.

    `lengths` are the ascending limits of ranges of source words, for each of which BLEU is computed too.
    `wanted` are the target returns of a model of trajectories, and `environment` is where it plays for them; without
    them those of the run are taken."""

    beam: int = 4
    length_penalty: float = 0.6
    tokenize: str | None = None
    lowercase: bool = False
    lengths: tuple[int, ...] = ()
    wanted: tuple[float, ...] = ()
    environment: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(Generic[M]):
    """A model and the data to score it on: batches, or examples as strings, or both.

    `row_length` is the maximum length of a row of tokens, unless a text was cut to `windows`; `section` is the data
    section of the run. `translate` translates texts with the model under `settings`, and `answer_sources` writes texts
    for sources that are no text, given with their segment ids. `on_progress` is called with the completed share.
    """

    model: M
    tokenizers: TaskTokenizers
    batches: ScoredBatches | None
    examples: Sequence[Example]
    row_length: int
    windows: ContextWindows | None = None
    section: object
    settings: EvaluationSettings
    translate: Callable[[Iterable[str]], Iterable[str]]
    answer_sources: Callable[[Tensor, Tensor | None], Sequence[str]]
    on_progress: Callable[[float], None] = lambda share: None


class EvaluationResult(NamedTuple):
    """The scores, and a description of how they were computed, with the numbers of how a text was `reading` cut."""

    scores: list[ScoreRecord]
    description: str
    reading: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class PredictionRequest(Generic[M]):
    """A model and its inputs: batches in the order of the data, texts, or pairs of texts.

    `section` is the data section of the run, `top` the number of labels to predict."""

    model: M
    tokenizers: TaskTokenizers
    batches: Iterable[Batch] | None = None
    texts: Iterable[str] = ()
    pairs: Iterable[tuple[str, str]] = ()
    row_length: int
    section: object = None
    top: int = 1


class LabelProbability(NamedTuple):
    """A label and its probability."""

    label: str
    probability: float


Prediction = tuple[tuple[LabelProbability, ...], ...]
"""The predictions of one input: for the input, or for each of its words, the most likely labels, the best first."""
