"""The pipeline of data in files: split, prepared once as token shards, then read as batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import tokenizers

from manyformer.batches import TextUnits
from manyformer.config import EncodedTextData
from manyformer.data.cache_folder import (
    RECORD_FILE,
    PreparationResult,
    PreparedData,
    load_or_prepare,
    load_prepared,
)
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.kind import DataKind, KindSection, OpenRequest
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import (
    DataSurvey,
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    data_lines,
    glance_lines,
    path_name,
)
from manyformer.data.paths_of_settings import check_paths, named_paths
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SampleSize, SourceT, Splits
from manyformer.data.summary import DataSummary
from manyformer.data.text_epochs import TextPlan
from manyformer.data.token_shards import TokenShard
from manyformer.data.utterances import UtterancePlan
from manyformer.errors import UserError
from manyformer.files.atomic_files import make_folder
from manyformer.files.json_records import DamagedFile

SURVEY_SIZE = SampleSize(records=10_000, characters=2_000_000)
"""So much of the files of a split is read for a look at them."""

PlanT = TypeVar("PlanT", bound=TextPlan | LengthBuckets | UtterancePlan)


class FilePipeline(ABC, Generic[KindSection, SourceT, PlanT]):
    """The steps from the files of a data section to batches, for one opening of the data.

    Sources are opened and split (`open_sources`), written to shards in the cache folder (`prepare`), and read by a plan
    of batches (`plan`). Each split has one shard for each of the `sides`. `prepared_settings` are the settings that
    decide the prepared files, besides the sources. With `resumes`, `prepare` continues what it finds in the folder of a
    preparation that was killed. `tokenizers` are those of a trained model, or else of preparation.
    """

    section: type[KindSection]
    forms: tuple[str, ...]
    sides: tuple[str, ...] = ()
    resumes: bool = False
    prepared_settings: tuple[str, ...]

    tokenizers: TokenizerPair

    def __init__(
        self, data: KindSection, form: str, request: OpenRequest, tokenizers: TokenizerPair | None = None
    ) -> None:
        self.data, self.form, self.request = data, form, request
        if tokenizers is not None:
            self.tokenizers = tokenizers

    @abstractmethod
    def open_sources(self, paths: PathOrPaths, split: str) -> list[SourceT]:
        """The sources at these paths, which are read for a split."""

    @abstractmethod
    def prepare(self, splits: Splits[SourceT], folder: Path) -> PreparationResult:
        """Write the shards of all splits to a folder."""

    @abstractmethod
    def token_limits(self) -> tuple[int, ...]:
        """For each side, a bound above all tokens in its shards."""

    @abstractmethod
    def write_file(self, path: EvaluationPath) -> list[TokenShard]:
        """Write the shards of other data of this kind, for a trained model."""

    @abstractmethod
    def plan(self, shards: Sequence[TokenShard], split: str) -> PlanT:
        """The plan of batches of a split, or of a file (split ""). Raises UserError if training data fills no batch."""

    @abstractmethod
    def length_limits(self, plans: Mapping[str, PlanT]) -> Iterable[LengthLimit]:
        """The longest sequences, which a model must allow."""

    @abstractmethod
    def describe(self, splits: Splits[SourceT], prepared: PreparedData, plans: Mapping[str, PlanT]) -> Iterator[str]:
        """A summary of the data for display."""

    def summarize(
        self, splits: Splits[SourceT], prepared: PreparedData, plans: Mapping[str, PlanT]
    ) -> DataSummary | None:
        """What a person can check at a glance; None for files that earlier versions prepared without it."""
        return prepared.summary

    def split(self) -> Splits[SourceT]:
        """Open the sources of all splits."""
        data: Any = self.data
        return Splits.open(self.open_sources, data.path, data.valid, data.test)

    def preparation(self) -> dict[str, Any]:
        """The settings that decide the prepared files."""
        settings = {name: getattr(self.data, name) for name in self.prepared_settings}
        # a section that trains its tokenizer has the settings of those from before there was a choice
        borrowed = isinstance(self.data, EncodedTextData) and self.data.tokenizer_of
        return settings | ({"tokenizer_of": borrowed} if borrowed else {})

    def library(self) -> str | None:
        """The version of the library that decides the prepared files."""
        return tokenizers.__version__

    def units(self, shards: Sequence[TokenShard]) -> TextUnits | None:
        """The units that scores are relative to; None if the targets do not encode a text."""
        return None

    def text(self, shards: Sequence[TokenShard]) -> TokenShard | None:
        """The tokens of a text by document, or the sources of pairs; None for other data."""
        return None

    def required_keywords(self) -> dict[str, int]:
        """The keywords that every model needs."""
        labels = self.tokenizers.labels
        return {"vocab": self.tokenizers.target.vocab} | ({} if labels is None else {"classes": len(labels)})

    def offered_keywords(self) -> dict[str, int]:
        """The keywords for models that accept them."""
        return {}

    def open(self) -> OpenedData:
        """Open the data for training; prepared files are reused if nothing that decides them has changed."""
        data, cache = self.data, self.request.cache
        check_paths(data)
        splits = self.split()
        settings = self.preparation() | {"kind": data.kind, "shares": splits.shares, "stamps": splits.stamps()}
        if (library := self.library()) is not None:
            settings["library"] = library
        prepared = load_or_prepare(
            cache,
            settings,
            lambda folder: self.prepare(splits, folder),
            resumes=self.resumes,
            belongs_to_model=self.request.belongs_to_model,
            log=self.request.log,
        )
        self.tokenizers = prepared.tokenizers
        required = self.required_keywords()
        shards = {name: self.shards_of(prepared, name) for name in splits.names}
        plans = {name: self.plan(shards[name], name) for name in splits.names}
        # equal numbers of another alphabet are other data
        plans["train"].fingerprint += f"-{prepared.tokenizers.fingerprint}"
        held_out = {
            name: HeldOutBatches(plan.fixed_epoch(), self.units(shards[name]))
            for name, plan in plans.items()
            if name != "train"
        }
        return OpenedData(
            tokenizers=prepared.tokenizers,
            train=Sampler(plans["train"], self.request.seed),
            valid=held_out["valid"],
            test=held_out.get("test"),
            summary_lines=tuple(self.describe(splits, prepared, plans)),
            length_limits=tuple(self.length_limits(plans)),
            cache=cache,
            required_keywords=required,
            offered_keywords=self.offered_keywords(),
            summary=self.summarize(splits, prepared, plans),
        )

    def survey(self) -> DataSurvey:
        """A look at the data: opened as for training if it is small, else at the beginning of its files."""
        folder = self.request.cache / "beginning"
        make_folder(folder)
        beginning = type(self)(self.data, self.form, self.request._replace(cache=folder))
        splits = beginning.split()
        splits.limit(SURVEY_SIZE)
        prepared = load_or_prepare(
            folder, {}, lambda target: beginning.prepare(splits, target), belongs_to_model=False, log=self.request.log
        )
        if not splits.are_cut_short:
            return DataSurvey.of_all(self.open())
        paths = ", ".join(named_paths(self.data))
        title = f"{self.section.model_fields['kind'].default}: {paths}"
        facts = () if prepared.summary is None else prepared.summary.facts()
        lines = (*data_lines([title, *facts]), *glance_lines(prepared.summary))
        limits = tuple(beginning.limits_of_part(splits, prepared))
        return DataSurvey(lines, prepared.summary, length_limits=limits)

    def limits_of_part(self, splits: Splits[SourceT], prepared: PreparedData) -> Iterator[LengthLimit]:
        """The longest sequences of a part of the data, as far as it fills the batches of training."""
        self.tokenizers = prepared.tokenizers
        with suppress(UserError):
            plans = {name: self.plan(self.shards_of(prepared, name), name) for name in splits.names}
            yield from self.length_limits(plans)

    def held_out(self, split: str | None) -> EvaluationData:
        """A held-out split: "valid", "test", or by default test if there is one, prepared again if files are missing.

        Raises UserError if there is no such split, and if the data has other tokenizers than the model.
        """
        cache, expected = self.request.cache, self.request.tokenizers
        prepared = load_prepared(cache)
        if prepared is None:
            self.open()
            prepared = load_prepared(cache)
        assert prepared is not None
        if expected is not None and expected.fingerprint != prepared.tokenizers.fingerprint:
            raise UserError(
                f"the data in {cache} was prepared with other tokenizers or labels than those of the model in "
                f"{cache.parent}; remove {cache} and restore the data of the training, or score another file"
            )
        has_test = any(name.partition(".")[0] == "test" for name in prepared.shards)
        if split == "test" and not has_test:
            raise UserError(
                f"the run in {cache.parent} has no test data (data.test); score the split valid, or another file"
            )
        self.tokenizers, name = prepared.tokenizers, split or ("test" if has_test else "valid")
        return self.evaluation_data(name, self.shards_of(prepared, name))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        """The data of files, with the tokenizers of a trained model."""
        return self.evaluation_data(path_name(path), self.write_file(path))

    def evaluation_data(self, name: str, shards: Sequence[TokenShard]) -> EvaluationData:
        """The data to score in the shards of a held-out split or of a file."""
        return EvaluationData(name, self.held_out_batches(shards), text=self.text(shards))

    def held_out_batches(self, shards: Sequence[TokenShard]) -> HeldOutBatches:
        """The batches of a held-out split or of a file, always in the same order."""
        return HeldOutBatches(self.plan(shards, "").fixed_epoch(), self.units(shards))

    def shard_names(self, split: str) -> list[str]:
        """The names of the shards of a split, or of a file (split "")."""
        return [f"{split}.{side}".removeprefix(".") for side in self.sides] or [split]

    def shards_of(self, prepared: PreparedData, split: str) -> list[TokenShard]:
        """The shards of a split, in the order of the sides. Raises DamagedFile for tokens that no model has."""
        names = self.shard_names(split)
        if missing := sorted(set(names) - set(prepared.shards)):
            raise DamagedFile(f"{self.request.cache / RECORD_FILE} is damaged: it lacks {missing[0]}")
        for name, limit in zip(names, self.token_limits(), strict=True):
            if (largest := prepared.shards[name].facts.largest) >= limit:
                path = self.request.cache / f"{name}.tokens"
                raise DamagedFile(f"{path} is damaged: it holds {largest:,}, and its values are below {limit:,}")
        return [prepared.shards[name] for name in names]

    @classmethod
    def limited_kind(cls, **optional: Any) -> DataKind[KindSection]:
        """The kind of data to register, whose sources can be read in part."""
        return cls.data_kind(survey=lambda data, form, request: cls(data, form, request).survey(), **optional)

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
