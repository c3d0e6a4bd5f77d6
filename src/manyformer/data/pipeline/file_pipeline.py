"""The pipeline of data in files: split, prepared once as token shards, then read as batches."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import tokenizers

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import make_folder
from manyformer.base.files.json_records import DamagedFile
from manyformer.config import EncodedTextData
from manyformer.data.batching.epochs import FixedEpochPlan, HeldOutBatches
from manyformer.data.pipeline.data_paths import check_paths, named_paths
from manyformer.data.pipeline.kind import DataKind, DataPipeline, KindSection
from manyformer.data.pipeline.opened import (
    DataSurvey,
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    data_lines,
    glance_lines,
    path_name,
)
from manyformer.data.pipeline.splits import PathOrPaths, SampleSize, SourceT, Splits
from manyformer.data.pipeline.summary import DataSummary, Finding
from manyformer.data.storage.cache_folder import RECORD_FILE, PreparationResult, PreparedData, load_or_prepare
from manyformer.data.storage.token_shards import TokenShard
from manyformer.nn.batches import TextUnits

SURVEY_SIZE = SampleSize(records=10_000, characters=2_000_000)
"""So much of the files of a split is read for a look at them."""

ReadT = TypeVar("ReadT")
PlanT = TypeVar("PlanT", bound=FixedEpochPlan)


class FilePipeline(DataPipeline[KindSection], Generic[KindSection, SourceT, PlanT]):
    """The steps from the files of a data section to batches, for one opening of the data.

    Sources are opened and split (`open_sources`), written to shards in the cache folder (`prepare`), and read by a plan
    of batches (`plan`). Each split has one shard for each of the `sides`. With `resumes`, `prepare` continues what it
    finds in the folder of a preparation that was killed.
    """

    sides: tuple[str, ...] = ()
    resumes: bool = False
    without_test = " (data.test); score the split valid, or another file"

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
        """The summary of the data; None for files that earlier versions prepared without it."""
        return prepared.summary

    def split(self) -> Splits[SourceT]:
        """Open the sources of all splits."""
        data: Any = self.data
        return Splits.open(self.open_sources, data.path, data.valid, data.test)

    def preparation(self) -> dict[str, Any]:
        settings = super().preparation()
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

    def open(self) -> OpenedData:
        data = self.data
        cache = self.request.cache
        # before anything is opened, so that all wrong paths are named together
        check_paths(data)
        # opening sources reads little; they are read as a whole only if `prepare` is called
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
        required_keywords = self.required_keywords()
        shards = {name: self.shards_of(prepared, name) for name in splits.names}
        plans = {name: self.plan(shards[name], name) for name in splits.names}
        # equal numbers of another alphabet are other data
        plans["train"].fingerprint += f"-{prepared.tokenizers.fingerprint}"
        held_out = {
            name: HeldOutBatches(plan.fixed_epoch(), self.units(shards[name]))
            for name, plan in plans.items()
            if name != "train"
        }
        return self.opened(
            plans["train"],
            held_out,
            required_keywords=required_keywords,
            lines=self.describe(splits, prepared, plans),
            summary=self.summarize(splits, prepared, plans),
            length_limits=self.length_limits(plans),
        )

    def survey(self) -> DataSurvey:
        """A look at the data: opened as for training if it is small, else at the beginning of its files."""
        # a folder of its own: what a look prepares must never be taken for the data of the run
        folder = self.request.cache / "beginning"
        make_folder(folder)
        beginning = type(self)(self.data, self.form, self.request._replace(cache=folder))
        splits = beginning.split()
        splits.limit(SURVEY_SIZE)
        prepared = load_or_prepare(
            folder, {}, lambda target: beginning.prepare(splits, target), belongs_to_model=False, log=self.request.log
        )
        # the beginning was all there is, so it is opened as training would
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
        # a part may be too small for one batch, which says nothing about the whole
        with suppress(UserError):
            plans = {name: self.plan(self.shards_of(prepared, name), name) for name in splits.names}
            yield from self.length_limits(plans)

    def read_file(self, path: EvaluationPath, read: Callable[[SourceT], Iterator[ReadT]]) -> Iterator[ReadT]:
        """The records of other data, as `read` reads its sources; the log says how they are read and what is odd."""
        for source in self.open_sources(path, "test"):
            for note in source.notes:
                self.request.log(note)
            yield from read(source)
            self.log_findings(source.found())

    def log_findings(self, findings: Iterable[Finding]) -> None:
        """Tell the log what was found in data."""
        for finding in findings:
            self.request.log(str(finding))

    def held_out_splits(self, prepared: PreparedData) -> Mapping[str, list[TokenShard]]:
        # a split has a shard for each side, named split.side
        names = dict.fromkeys(name.partition(".")[0] for name in prepared.shards)
        return {name: self.shards_of(prepared, name) for name in names if name != "train"}

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        return self.evaluation_data(path_name(path), self.write_file(path))

    def evaluation_data(self, name: str, split: Sequence[TokenShard]) -> EvaluationData:
        return EvaluationData(name, self.held_out_batches(split), text=self.text(split))

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
            # an id beyond the vocabulary would fail within the embedding, on a GPU without a usable message
            if (largest := prepared.shards[name].facts.largest) >= limit:
                path = self.request.cache / f"{name}.tokens"
                raise DamagedFile(f"{path} is damaged: it holds {largest:,}, and its values are below {limit:,}")
        return [prepared.shards[name] for name in names]

    @classmethod
    def limited_kind(cls, **optional: Any) -> DataKind[KindSection]:
        """The kind of data to register, whose sources can be read in part."""
        return cls.data_kind(survey=lambda data, form, request: cls(data, form, request).survey(), **optional)
