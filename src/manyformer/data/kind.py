"""Kinds of data: how a data section becomes batches, held-out data and data of a file, and their registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, final

from manyformer.config import DATA_SECTIONS, DataSection, register_section
from manyformer.context_windows import ContextWindows
from manyformer.data.opened import DataSurvey, EvaluationData, EvaluationPath, OpenedData, UnlabelledData
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.errors import UserError, suggest_names
from manyformer.type_aliases import LogFn

KindSection = TypeVar("KindSection", bound=DataSection)
HELD_OUT_SPLITS = ("valid", "test")


def no_log(line: str) -> None:
    """Ignore a line of the log."""


class OpenRequest(NamedTuple):
    """How data is opened: the padded tokens of a batch, the folder of prepared files, the seed of the shuffles.

    If the prepared files belong to a trained model, they are not replaced by files of other data; `tokenizers` are
    those of its final model, which must be those of the files. Held-out text is cut to `windows`, None for its rows.
    """

    batch_tokens: int
    cache: Path
    seed: int = 0
    log: LogFn = no_log
    belongs_to_model: bool = False
    tokenizers: TokenizerPair | None = None
    windows: ContextWindows | None = None


@final
@dataclass(frozen=True, kw_only=True)
class DataKind(Generic[KindSection]):
    """A kind of data, selected by the `kind` of its section.

    A form is what a task reads of the data, such as "labelled" or "levels" of images; a task names one for each kind.
    """

    section: type[KindSection]
    forms: tuple[str, ...]
    open: Callable[[KindSection, str, OpenRequest], OpenedData]
    held_out: Callable[[KindSection, str, OpenRequest, str | None], EvaluationData]
    """A split that training held out: "test", "valid", or by default test if there is one."""
    from_file: Callable[[KindSection, str, TokenizerPair, EvaluationPath, OpenRequest], EvaluationData]
    """The data of a file for a trained model; `request.cache` is a folder for its shards."""
    unlabelled: Callable[[KindSection, TokenizerPair, str, OpenRequest], UnlabelledData] | None = None
    """The inputs in a file to predict labels for, None if there are no labels to predict."""
    survey: Callable[[KindSection, str, OpenRequest], DataSurvey] | None = None
    """A look at the beginning of the files, with `request.cache` as a folder for what it needs; None for data that is
    opened as a whole."""
    sample_prompt: Callable[[KindSection, OpenRequest], str] | None = None
    """The text that a sample after training continues; None if a prompt is no text."""
    windowed_forms: tuple[str, ...] = ()
    """The forms in which held-out data is cut to the `windows` of a request."""
    cache_is_shared: bool = False
    """Whether the prepared files of a run serve settings of this kind that differ from those of the run."""

    @property
    def name(self) -> str:
        """The value of `data.kind`."""
        return str(self.section.model_fields["kind"].default)

    def check_form(self, form: str) -> None:
        """Raise UserError for a form that this kind of data does not have."""
        if form not in self.forms:
            raise UserError(f"data of kind {self.name} has no form '{form}'; {suggest_names(form, self.forms)}")


_KINDS: dict[type[DataSection], DataKind[Any]] = {}


def register(kind: DataKind[KindSection]) -> DataKind[KindSection]:
    """Add a kind of data and its section. Raises UserError if the name of the kind is taken."""
    register_section(kind.section)
    if _KINDS.setdefault(kind.section, kind) is not kind:
        raise UserError(f"data.kind={kind.name} is registered twice; rename one of the two kinds")
    return kind


def data_kinds() -> Mapping[str, DataKind[Any]]:
    """All registered kinds of data by name."""
    return {name: _KINDS[section] for name, section in DATA_SECTIONS.items() if section in _KINDS}


def kind_of(section: DataSection) -> DataKind[Any]:
    """The kind of data of a section."""
    return next(_KINDS[base] for base in type(section).__mro__ if base in _KINDS)
