"""The pipeline of data in arrays: read and checked once, kept in the cache, then split and read as batches."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.type_aliases import LogFn
from manyformer.data.batching.epochs import Epoch, EpochPlan, HeldOutBatches
from manyformer.data.pipeline.kind import DataPipeline, KindSection
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, path_name
from manyformer.data.pipeline.summary import DataSummary
from manyformer.data.storage.array_archives import hash_arrays, write_arrays
from manyformer.data.storage.cache_folder import (
    RECORD_FILE,
    PreparationResult,
    PreparedData,
    load_or_prepare,
    read_record,
)
from manyformer.data.text.text_files import existing_path
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import NoTokenizer


class CheckedArrays(Protocol):
    """The arrays of a data set, compared with each other when they were read."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of an archive that is read as this data set."""


ArraysT = TypeVar("ArraysT", bound=CheckedArrays)
SplitT = TypeVar("SplitT")


class ArrayPipeline(DataPipeline[KindSection], Generic[KindSection, ArraysT, SplitT]):
    """The steps from the arrays of a data section to batches, for one opening of the data.

    The arrays are read from the sources of the section (`read_sources`) and kept in the cache as an archive, which
    `read_archive` reads again. A split of them (`splits`) is read by a plan of batches (`plan`), or in a fixed order
    (`fixed_epoch`). `nouns` are the items of the arrays, "graphs", in messages and in the name of the kept file.
    """

    nouns: str
    without_test = "; its archive names none"

    arrays: ArraysT

    @abstractmethod
    def stamps(self) -> list[Any]:
        """Values that change when the sources change."""

    @staticmethod
    @abstractmethod
    def read_archive(path: Path, log: LogFn | None = None) -> ArraysT:
        """The arrays of an archive; a line in the log names arrays that are not read. Raises UserError for a defect."""

    def read_sources(self) -> ArraysT:
        """The arrays that the section names. Raises UserError for a defect."""
        return self.read_archive(existing_path(self.path), self.request.log)

    @abstractmethod
    def splits(self) -> dict[str, SplitT]:
        """The splits of the arrays, always the same ones. Raises UserError where nothing is left to learn."""

    @abstractmethod
    def split_of_file(self) -> SplitT:
        """The part of another file's arrays that is scored. Raises UserError for labels that the model lacks."""

    @abstractmethod
    def plan(self, train: SplitT, fingerprint: str) -> EpochPlan:
        """The plan of the batches of training; `fingerprint` is that of the arrays."""

    @abstractmethod
    def required_keywords(self, train: SplitT) -> dict[str, Any]:
        """The keywords that every model needs."""

    @abstractmethod
    def fixed_epoch(self, split: SplitT) -> Epoch:
        """The batches of held-out data."""

    @abstractmethod
    def describe(self, splits: Mapping[str, SplitT]) -> Iterator[str]:
        """A summary of the data for display."""

    @abstractmethod
    def summarize(self, splits: Mapping[str, SplitT]) -> DataSummary:
        """The summary of the data."""

    def learn_tokenizers(self) -> TokenizerPair:
        """The tokenizers of the arrays, and the names of their labels."""
        none = NoTokenizer()
        return TokenizerPair(none, none, self.label_names() or None)

    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, none if there are none to predict."""
        return ()

    def check_labels(self) -> None:
        """Raise UserError for labels that are not those of the model."""
        names = self.label_names()
        expected = self.tokenizers.labels
        if names != (expected or ()):
            raise UserError(f"{self.path}: its labels are {names}, the model's {expected}")

    def length_limits(self) -> tuple[LengthLimit, ...]:
        """The longest sequences, which a model must allow."""
        return ()

    def open(self) -> OpenedData:
        request = self.request
        # stamps of the sources are part of the key: changed files are read again
        settings = self.preparation() | {"kind": self.data.kind, "stamps": self.stamps()}
        prepared = load_or_prepare(
            request.cache, settings, self.prepare, belongs_to_model=request.belongs_to_model, log=request.log
        )
        self.use_prepared(prepared)
        # arrays are kept whole and split at every opening, so another split needs no new preparation
        splits = self.splits()
        plan = self.plan(splits["train"], prepared.hashes[self.file_name])
        held_out = {name: self.held_out_batches(split) for name, split in splits.items() if name != "train"}
        return self.opened(
            plan,
            held_out,
            required_keywords=self.required_keywords(splits["train"]),
            lines=self.describe(splits),
            summary=self.summarize(splits),
            length_limits=self.length_limits(),
        )

    def prepare(self, folder: Path) -> PreparationResult:
        """Read the sources and write their arrays to a folder."""
        self.arrays = self.read_sources()
        arrays = self.arrays.to_arrays()
        write_arrays(folder / self.file_name, arrays)
        digest = hash_arrays(arrays)
        # shards are compared by their facts; arrays have no shards, so their hash is compared here
        previous = None
        if self.request.belongs_to_model:
            previous = read_record(self.request.cache)
        if previous is not None and previous.sources.get(self.file_name) != digest:
            raise UserError(
                f"{self.path}: these {self.nouns} are others than those that this run was trained on; "
                "restore the previous data, or start a new run"
            )
        return PreparationResult(self.learn_tokenizers(), {}, {self.file_name: digest}, {})

    def held_out_splits(self, prepared: PreparedData) -> Mapping[str, SplitT]:
        return self.splits()

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # the file is read by the settings of the run, by a pipeline of its own
        section = self.data.model_copy(update={"path": path})
        pipeline = type(self)(section, self.form, self.request, self.tokenizers)
        pipeline.arrays = pipeline.read_sources()
        return pipeline.evaluation_data(path_name(path), pipeline.split_of_file())

    def evaluation_data(self, name: str, split: SplitT) -> EvaluationData:
        return EvaluationData(name, self.held_out_batches(split))

    def held_out_batches(self, split: SplitT) -> HeldOutBatches:
        """The batches of a held-out split or of a file, always in the same order."""
        return HeldOutBatches(self.fixed_epoch(split), None)

    def use_prepared(self, prepared: PreparedData) -> None:
        """Read the kept arrays, whose file must be as it was written. Raises DamagedFile."""
        super().use_prepared(prepared)
        files = VerifiedFolder.open(self.request.cache)
        # the manifest may be valid, and belong to prepared data of another kind
        if self.file_name not in files:
            record = self.request.cache / RECORD_FILE
            raise DamagedFile(f"{record} is damaged: there is no {self.file_name} beside it")
        self.arrays = self.read_archive(files.file(self.file_name))

    @property
    def path(self) -> str:
        """The path of the sources, or the paths, for messages."""
        data: Any = self.data
        return path_name(data.path)

    @property
    def file_name(self) -> str:
        """The file of the cache that keeps the arrays."""
        return f"{self.nouns}.npz"
