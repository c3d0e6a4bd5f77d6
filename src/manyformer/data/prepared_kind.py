"""The pipeline of data in files: split, prepared once as token shards, then read as batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import tokenizers

from manyformer.batches import TextUnits
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare, load_prepared
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.kind import DataKind, KindSection, OpenRequest
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, path_name
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SourceT, Splits
from manyformer.data.text_epochs import TextPlan
from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError

PlanT = TypeVar("PlanT", bound=TextPlan | LengthBuckets)


class Opening(NamedTuple, Generic[KindSection]):
    """What all steps of reading prepared data need: the section, the form, the tokenizers, and the request."""

    data: KindSection
    form: str
    tokenizers: TokenizerPair
    request: OpenRequest


class PreparedKind(ABC, Generic[KindSection, SourceT, PlanT]):
    """A kind of data in files, as the steps in which it differs from the others.

    Sources are opened and split (`open_sources`), written to shards in the cache folder (`prepare`), and read by a plan
    of batches (`plan`). Each split has one shard for each of the `sides`. `prepared_settings` are the settings that
    decide the prepared files, besides the sources.
    """

    section: type[KindSection]
    forms: tuple[str, ...]
    sides: tuple[str, ...] = ()
    prepared_settings: tuple[str, ...]

    @abstractmethod
    def open_sources(self, data: KindSection, paths: PathOrPaths, split: str, cache: Path) -> list[SourceT]:
        """The sources at these paths, which are read for a split."""

    @abstractmethod
    def prepare(self, data: KindSection, splits: Splits[SourceT], request: OpenRequest) -> PreparationResult:
        """Write the shards of all splits to the cache folder."""

    @abstractmethod
    def write_file(self, opening: Opening[KindSection], path: EvaluationPath) -> list[TokenShard]:
        """Write the shards of other data of this kind, for a trained model."""

    @abstractmethod
    def plan(self, opening: Opening[KindSection], shards: Sequence[TokenShard], split: str) -> PlanT:
        """The plan of batches of a split, or of a file (split ""). Raises UserError if training data fills no batch."""

    @abstractmethod
    def length_limits(self, opening: Opening[KindSection], plans: Mapping[str, PlanT]) -> Iterable[LengthLimit]:
        """The longest sequences, which a model must allow."""

    @abstractmethod
    def describe(
        self,
        opening: Opening[KindSection],
        splits: Splits[SourceT],
        prepared: PreparedData,
        plans: Mapping[str, PlanT],
    ) -> Iterator[str]:
        """A summary of the data for display."""

    def split(self, data: Any, cache: Path) -> Splits[SourceT]:
        """Open the sources of all splits."""
        return Splits.open(
            lambda paths, split: self.open_sources(data, paths, split, cache), data.path, data.valid, data.test
        )

    def library(self, data: KindSection) -> str | None:
        """The version of the library that decides the prepared files."""
        return tokenizers.__version__

    def units(self, opening: Opening[KindSection], shards: Sequence[TokenShard]) -> TextUnits | None:
        """The units that scores are relative to; None if the targets do not encode a text."""
        return None

    def required_keywords(self, opening: Opening[KindSection]) -> dict[str, int]:
        """The keywords that every model needs."""
        labels = opening.tokenizers.labels
        return {"vocab": opening.tokenizers.target.vocab} | ({} if labels is None else {"classes": len(labels)})

    def offered_keywords(self, opening: Opening[KindSection]) -> dict[str, int]:
        """The keywords for models that accept them."""
        return {}

    def open(self, data: KindSection, form: str, request: OpenRequest) -> OpenedData:
        """Open the data for training; prepared files are reused if nothing that decides them has changed."""
        splits = self.split(data, request.cache)
        settings = {name: getattr(data, name) for name in self.prepared_settings}
        settings |= {"kind": data.kind, "shares": splits.shares, "stamps": splits.stamps()}
        if (library := self.library(data)) is not None:
            settings["library"] = library
        prepared = load_or_prepare(request.cache, settings, lambda: self.prepare(data, splits, request))
        opening = Opening(data, form, prepared.tokenizers, request)
        required = self.required_keywords(opening)
        shards = {name: self.shards_of(prepared, name) for name in splits.names}
        plans = {name: self.plan(opening, shards[name], name) for name in splits.names}
        held_out = {
            name: HeldOutBatches(plan.fixed_epoch(), self.units(opening, shards[name]))
            for name, plan in plans.items()
            if name != "train"
        }
        return OpenedData(
            tokenizers=prepared.tokenizers,
            train=Sampler(plans["train"], request.seed),
            valid=held_out["valid"],
            test=held_out.get("test"),
            summary_lines=tuple(self.describe(opening, splits, prepared, plans)),
            length_limits=tuple(self.length_limits(opening, plans)),
            cache=request.cache,
            required_keywords=required,
            offered_keywords=self.offered_keywords(opening),
        )

    def held_out(self, data: KindSection, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
        """A held-out split: "valid", "test", or by default test if there is one, prepared again if files are missing.

        Raises UserError if there is no such split.
        """
        prepared = load_prepared(request.cache)
        if prepared is None:
            self.open(data, form, request)
            prepared = load_prepared(request.cache)
        assert prepared is not None
        has_test = any(name.partition(".")[0] == "test" for name in prepared.shards)
        if split == "test" and not has_test:
            folder = request.cache.parent
            raise UserError(f"the run in {folder} has no test data (data.test); score the split valid, or another file")
        name = split or ("test" if has_test else "valid")
        opening = Opening(data, form, prepared.tokenizers, request)
        return EvaluationData(name, self.held_out_batches(opening, self.shards_of(prepared, name)))

    def from_file(
        self, data: KindSection, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
    ) -> EvaluationData:
        """The data of files, with the tokenizers of a trained model."""
        opening = Opening(data, form, tokenizers, request)
        return EvaluationData(path_name(path), self.held_out_batches(opening, self.write_file(opening, path)))

    def shard_names(self, split: str) -> list[str]:
        """The names of the shards of a split, or of a file (split "")."""
        return [f"{split}.{side}".removeprefix(".") for side in self.sides] or [split]

    def shards_of(self, prepared: PreparedData, split: str) -> list[TokenShard]:
        """The shards of a split, in the order of the sides."""
        return [prepared.shards[name] for name in self.shard_names(split)]

    def data_kind(self, **optional: Any) -> DataKind[KindSection]:
        """The kind of data to register, with its `optional` parts."""
        return DataKind(
            section=self.section,
            forms=self.forms,
            open=self.open,
            held_out=self.held_out,
            from_file=self.from_file,
            **optional,
        )

    def held_out_batches(self, opening: Opening[KindSection], shards: Sequence[TokenShard]) -> HeldOutBatches:
        """The batches of a held-out split or of a file, always in the same order."""
        return HeldOutBatches(self.plan(opening, shards, "").fixed_epoch(), self.units(opening, shards))
