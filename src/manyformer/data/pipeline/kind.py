"""Kinds of data: how a data section becomes batches, held-out data and data of a file, and their registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, final

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.type_aliases import LogFn
from manyformer.config import DATA_SECTIONS, DataSection, GivenData, register_section
from manyformer.data.batching.epochs import EpochPlan, HeldOutBatches, Sampler
from manyformer.data.pipeline.opened import (
    DataSurvey,
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
)
from manyformer.data.pipeline.summary import DataSummary
from manyformer.data.storage.cache_folder import PreparedData, load_prepared
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair

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
    """The text that a sample after training continues; None if a reader could not judge the sample."""
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


class DataPipeline(ABC, Generic[KindSection]):
    """The steps from a data section to batches, for one opening of the data.

    `prepared_settings` are the settings that decide the prepared files, besides the sources. `tokenizers` are those of
    a trained model, or else of preparation. `without_test` is what there is to say, or to do, without test data.
    """

    section: type[KindSection]
    forms: tuple[str, ...]
    prepared_settings: tuple[str, ...] = ()
    without_test: str

    tokenizers: TokenizerPair

    def __init__(
        self, data: KindSection, form: str, request: OpenRequest, tokenizers: TokenizerPair | None = None
    ) -> None:
        self.data = data
        self.form = form
        self.request = request
        if tokenizers is not None:
            self.tokenizers = tokenizers

    @abstractmethod
    def open(self) -> OpenedData:
        """Open the data for training; prepared files are reused if nothing that decides them has changed."""

    def held_out(self, split: str | None) -> EvaluationData:
        """A held-out split: "valid", "test", or by default test if there is one, prepared again if files are missing.

        Raises UserError if there is no such split, and if the data has other tokenizers than the model.
        """
        cache = self.request.cache
        prepared = load_prepared(cache)
        if prepared is None:
            self.open()
            # opening has written them
            prepared = load_prepared(cache)
        assert prepared is not None
        self.use_prepared(prepared)
        splits = self.held_out_splits(prepared)
        name = split or ("test" if "test" in splits else "valid")
        if name not in splits:
            raise UserError(f"the run in {cache.parent} has no {name} data{self.without_test}")
        return self.evaluation_data(name, splits[name])

    @abstractmethod
    def held_out_splits(self, prepared: PreparedData) -> Mapping[str, Any]:
        """The splits of prepared data that were held out, by name."""

    @abstractmethod
    def evaluation_data(self, name: str, split: Any) -> EvaluationData:
        """The data to score of a held-out split, or of a file."""

    @abstractmethod
    def from_file(self, path: EvaluationPath) -> EvaluationData:
        """The data of files, with the tokenizers of a trained model."""

    def preparation(self) -> dict[str, Any]:
        """The settings that decide the prepared files."""
        return {name: getattr(self.data, name) for name in self.prepared_settings}

    def offered_keywords(self) -> Mapping[str, int | None]:
        """The keywords for models that accept them."""
        return {}

    def opened(
        self,
        train: EpochPlan,
        held_out: Mapping[str, HeldOutBatches],
        *,
        required_keywords: Mapping[str, Any],
        lines: Iterable[str],
        summary: DataSummary | None,
        length_limits: Iterable[LengthLimit] = (),
    ) -> OpenedData:
        """The opened data set with these batches."""
        return OpenedData(
            tokenizers=self.tokenizers,
            train=Sampler(train, self.request.seed),
            valid=held_out["valid"],
            test=held_out.get("test"),
            summary_lines=tuple(lines),
            length_limits=tuple(length_limits),
            cache=self.request.cache,
            required_keywords=required_keywords,
            offered_keywords=self.offered_keywords(),
            summary=summary,
        )

    def use_prepared(self, prepared: PreparedData) -> None:
        """Use the tokenizers of prepared data. Raises UserError if the model has others."""
        cache = self.request.cache
        # a cache can be newer than the model beside it, if its data was prepared again
        expected = self.request.tokenizers
        if expected is not None and expected.fingerprint != prepared.tokenizers.fingerprint:
            raise UserError(
                f"the data in {cache} was prepared with other tokenizers or labels than those of the model in "
                f"{cache.parent}; remove {cache} and restore the data of the training, or score another file"
            )
        self.tokenizers = prepared.tokenizers

    @classmethod
    def data_kind(cls, **optional: Any) -> DataKind[KindSection]:
        """The kind of data to register, with its `optional` parts."""
        return DataKind(
            section=cls.section,
            forms=cls.forms,
            open=lambda data, form, request: cls(data, form, request).open(),
            held_out=lambda data, form, request, split: cls(data, form, request).held_out(split),
            from_file=lambda data, form, pair, path, request: cls(data, form, request, pair).from_file(path),
            **optional,
        )


_KINDS: dict[type[DataSection], DataKind[Any]] = {}


def register(kind: DataKind[KindSection]) -> DataKind[KindSection]:
    """Add a kind of data and its section. Raises UserError if the name of the kind is taken."""
    register_section(kind.section)
    # the same object again is no conflict: a module may be imported twice
    if _KINDS.setdefault(kind.section, kind) is not kind:
        raise UserError(f"data.kind={kind.name} is registered twice; rename one of the two kinds")
    return kind


def data_kinds() -> Mapping[str, DataKind[Any]]:
    """All registered kinds of data by name."""
    return {name: _KINDS[section] for name, section in DATA_SECTIONS.items() if section in _KINDS}


def kind_of(section: DataSection) -> DataKind[Any]:
    """The kind of data of a section. Raises UserError for batches that a program gave, which no file names."""
    if isinstance(section, GivenData):
        raise UserError(
            f"data.kind={section.kind} is what a Python program gives to mf.train(model, data=...); a command cannot "
            "read it: mf.train, mf.evaluate and mf.compare take it in Python"
        )
    # sections of generated data are subclasses, one for each rule, of the section of their kind
    return next(_KINDS[base] for base in type(section).__mro__ if base in _KINDS)
