"""What the evaluation and the prediction of a trained model are given and return."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

from torch import Tensor
from typing_extensions import TypeVar

from manyformer.batches import Batch, TextUnits
from manyformer.context_windows import ContextWindows
from manyformer.models import Model
from manyformer.scores import ScoreRecord
from manyformer.tasks.tokenizer_protocols import TaskTokenizers

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
    """How translations are searched for and compared; `tokenize` and `lowercase` are sacrebleu's.

    `lengths` are the ascending limits of ranges of source words, for each of which BLEU is computed too.
    `wanted` are the returns that a model of trajectories is asked for, and `environment` where; without them those of
    the run."""

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
