"""Opening examples of several parts: read and checked once, then split and read as batches."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from manyformer.base.errors import UserError, list_names
from manyformer.base.type_aliases import IntArray
from manyformer.config import ModalitiesData
from manyformer.data.audio.audio_reading import INT16_SCALE
from manyformer.data.audio.log_mel import FrameSettings, FrameStatistics, LogMelFrontEnd
from manyformer.data.batching.length_buckets import EncodedTexts
from manyformer.data.modalities.modality_examples import (
    NO_PART,
    CaptionReader,
    ContrastReader,
    ExampleEpoch,
    ExamplePlan,
    ExampleReader,
    ExampleSet,
    FrontEndRecordings,
    LabelReader,
    ModalityArrays,
    RecordingArrays,
    read_modality_archive,
    rows_of_batch,
)
from manyformer.data.pipeline.array_pipeline import ArrayPipeline
from manyformer.data.pipeline.kind import OpenRequest, register
from manyformer.data.pipeline.opened import EvaluationData, HeldOutExample, UnlabelledData, UnlabelledInput
from manyformer.data.pipeline.summary import DataSummary, ExampleFacts, LengthSummary
from manyformer.data.storage.array_archives import NO_LABEL, complete_splits, count_labels, find_items, unused_items
from manyformer.data.text.text_files import existing_path, file_stamp
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, train_tokenizer
from manyformer.data.tokenizers.tokenizer import NoTokenizer, Tokenizer

READERS: dict[str, Callable[[ExampleSet], ExampleReader]] = {
    "captions": CaptionReader,
    "labelled": LabelReader,
    "contrast": ContrastReader,
}
"""The reader of the examples in each form."""


class ExampleSplit(NamedTuple):
    """The examples of a split, and those among them that have what is read."""

    listed: IntArray
    usable: IntArray


class ModalitiesPipeline(ArrayPipeline[ModalitiesData, ModalityArrays, ExampleSplit]):
    """Examples of several parts, in one of the forms of `READERS`."""

    section = ModalitiesData
    forms = tuple(READERS)
    prepared_settings = ("tokenizer", "vocab", "valid", "mels", "window", "hop")
    read_archive = staticmethod(read_modality_archive)
    nouns = "examples"

    def stamps(self) -> list[str | int]:
        return file_stamp(existing_path(self.data.path))

    def label_names(self) -> tuple[str, ...]:
        return self.arrays.label_names

    def learn_tokenizers(self) -> TokenizerPair:
        """The front end of the recordings and the tokenizer of the texts, both learned from training examples."""
        arrays = self.arrays
        train = self._listed()["train"]
        none = NoTokenizer()
        # of training examples alone: held-out ones decide neither vocabulary nor normalization
        used = {part: np.unique(index[train][index[train] != NO_PART]) for part, index in arrays.part_index.items()}
        front_end = none if arrays.recordings is None else self._train_front_end(arrays.recordings, used["sound"])
        tokenizer: Tokenizer = none
        if arrays.texts is not None:
            tokenizer = train_tokenizer(self.data.tokenizer, arrays.texts[used["text"]].tolist(), self.data.vocab)
        return TokenizerPair(front_end, tokenizer, arrays.label_names or None)

    @cached_property
    def reader(self) -> ExampleReader:
        """The reader of the examples. Raises UserError for parts that the archive or the form does not have."""
        arrays = self.arrays
        form = self.form
        if self.data.parts is None:
            parts: tuple[str, ...] = tuple(arrays.part_index)
        else:
            parts = self.data.parts
        if form == "captions":
            # captions are texts of images, whatever else examples have
            parts = ("image", "text")
        for part in parts:
            if part not in arrays.part_index:
                raise UserError(f"{self.path}: there is no {part} in it, but only {list_names(arrays.part_index)}")
        if form == "contrast" and len(parts) != 2:
            raise UserError(f"data.parts must be the two parts that are compared, and is {', '.join(parts)}")
        if form == "labelled" and not arrays.label_names:
            raise UserError(f"{self.path}: there is no array labels in it, which a classifier learns")
        texts = None
        if "text" in parts:
            assert arrays.texts is not None
            texts = EncodedTexts(arrays.texts.tolist(), self.tokenizers.target)
        recordings = self._recordings() if "sound" in parts else None
        return READERS[form](ExampleSet(arrays, texts, recordings, parts))

    def splits(self) -> dict[str, ExampleSplit]:
        return {
            name: self._split(examples, f"{self.path}: the {name} data") for name, examples in self._listed().items()
        }

    def split_of_file(self) -> ExampleSplit:
        if self.form == "labelled":
            self.check_labels()
        return self._split(self.arrays.splits.get("test", np.arange(len(self.arrays.labels))), self.path)

    def plan(self, train: ExampleSplit, fingerprint: str) -> ExamplePlan:
        settings = f"{fingerprint}-{self.form}-{self.reader.data.parts}-{self.tokenizers.fingerprint}"
        return ExamplePlan(self.reader, train.usable, self.request.batch_tokens, self.data.part_dropout, settings)

    def fixed_epoch(self, split: ExampleSplit) -> ExampleEpoch:
        rows = rows_of_batch(self.reader, split.usable, self.request.batch_tokens)
        return ExampleEpoch(self.reader, split.usable, rows)

    def evaluation_data(self, name: str, split: ExampleSplit) -> EvaluationData:
        arrays = self.arrays
        evaluation = super().evaluation_data(name, split)
        if arrays.texts is None or "text" not in self.reader.data.parts:
            return evaluation
        texts = arrays.texts[arrays.part_index["text"][split.usable]].tolist()
        examples = (
            HeldOutExample(f"example {number}", text, f"{name}: example {number}")
            for number, text in zip(split.usable.tolist(), texts, strict=True)
        )
        return evaluation._replace(examples=tuple(examples))

    def unlabelled(self) -> UnlabelledData:
        """All examples of the archive, in order; labels are ignored."""
        arrays = self.read_sources()
        # a label of 0 for all: examples without a label would be left out
        self.arrays = arrays._replace(labels=np.zeros_like(arrays.labels))
        examples = np.arange(len(arrays.labels))
        inputs = [UnlabelledInput(f"{self.path}: example {example}", is_file=True) for example in examples]
        return UnlabelledData(inputs, self.held_out_batches(ExampleSplit(examples, examples)))

    def required_keywords(self, train: ExampleSplit) -> dict[str, int]:
        if self.form == "captions":
            return {"vocab": self.tokenizers.target.vocab}
        if self.form == "labelled":
            return {"classes": len(self.arrays.label_names)}
        return {}

    def offered_keywords(self) -> dict[str, int | None]:
        """The sizes of the parts that are read, None for those of others."""
        data = self.reader.data
        keywords: dict[str, int | None] = dict.fromkeys(("height", "width", "channels", "mels", "vocab"))
        if "image" in data.parts:
            assert data.arrays.images is not None
            keywords |= dict(zip(("height", "width", "channels"), data.arrays.images.shape[1:], strict=True))
        if data.recordings is not None:
            keywords["mels"] = data.recordings.front_end.settings.mels
        if "text" in data.parts:
            keywords["vocab"] = self.tokenizers.target.vocab
        return keywords

    def describe(self, splits: Mapping[str, ExampleSplit]) -> Iterator[str]:
        arrays = self.arrays
        labels = ""
        if arrays.label_names:
            labels = f"; {len(arrays.label_names):,} labels"
        yield f"examples of several parts: {self.path}; {len(arrays.labels):,} examples{labels}"
        counts: dict[str, Any] = {part: int((arrays.part_index[part] >= 0).sum()) for part in self.reader.data.parts}
        yield "parts: " + "; ".join(f"{count:,} with {part}" for part, count in counts.items())
        yield "; ".join(f"{name}: {len(split.usable):,} examples" for name, split in splits.items())

    def summarize(self, splits: Mapping[str, ExampleSplit]) -> DataSummary:
        arrays = self.arrays
        train = splits["train"].usable
        is_labelled = self.form == "labelled"
        if is_labelled:
            labels = arrays.labels
        else:
            labels = np.zeros_like(arrays.labels)
        lacks_part = np.zeros(len(labels), dtype=bool)
        for split in splits.values():
            lacks_part[np.setdiff1d(split.listed, split.usable)] = True
        # a classifier reads what is there of an example, others need all of it
        reason = f"left out for lack of {(' and ' if is_labelled else ' or ').join(self.reader.data.parts)}"
        facts = ExampleFacts(["train"])
        for example in train:
            label = None
            if is_labelled:
                label = arrays.label_names[labels[example]]
            facts.show(list(self._shown_parts(int(example), label)), label)
        return DataSummary(
            noun="example",
            counts={name: len(split.usable) for name, split in splits.items()},
            labels=count_labels(labels[train], arrays.label_names) if is_labelled else None,
            left_out=(
                *find_items(lacks_part & (labels != NO_LABEL), "example", reason),
                *unused_items({name: split.listed for name, split in splits.items()}, labels, "example"),
            ),
            examples=facts.examples,
            other_lengths=tuple(self._part_lengths(train)),
        )

    def _listed(self) -> dict[str, IntArray]:
        """The examples of each split."""
        return complete_splits(self.arrays.splits, self.arrays.labels, self.data.valid, self.path)

    def _split(self, examples: IntArray, subject: str) -> ExampleSplit:
        """These examples as a split. Raises UserError if none of them has what is read."""
        usable = self.reader.usable(examples)
        if not len(usable):
            parts = ", ".join(self.reader.data.parts)
            raise UserError(f"{subject} has no example with what this model reads: {parts}")
        return ExampleSplit(examples, usable)

    def _train_front_end(self, recordings: RecordingArrays, used: IntArray) -> LogMelFrontEnd:
        """The front end with the mean and deviation of the bands of these recordings."""
        data = self.data
        statistics = FrameStatistics(FrameSettings.of_milliseconds(recordings.rate, data.mels, data.window, data.hop))
        stops = recordings.lengths.cumsum()
        starts = stops - recordings.lengths
        for recording in used:
            levels = recordings.samples[starts[recording] : stops[recording]]
            statistics.add(levels.astype(np.float32) / np.float32(INT16_SCALE))
        return statistics.front_end()

    def _recordings(self) -> FrontEndRecordings:
        recordings = self.arrays.recordings
        front_end = self.tokenizers.source
        assert recordings is not None
        assert isinstance(front_end, LogMelFrontEnd)
        rate = front_end.settings.sample_rate
        if recordings.rate != rate:
            raise UserError(
                f"{self.path}: its recordings have {recordings.rate:,} samples a second, and those of the model "
                f"{rate:,}; resample them"
            )
        return FrontEndRecordings(recordings, front_end)

    def _shown_parts(self, example: int, label: str | None) -> Iterator[str]:
        """The cells of an example in a summary: its number, its text and its label."""
        arrays = self.arrays
        yield f"example {example}"
        if arrays.texts is not None and "text" in self.reader.data.parts:
            text = arrays.part_index["text"][example]
            yield "no text" if text == NO_PART else str(arrays.texts[text])
        if label is not None:
            yield label

    def _part_lengths(self, train: IntArray) -> Iterator[LengthSummary]:
        """The lengths of the parts of training examples that have one."""
        arrays = self.arrays
        texts = self.reader.data.texts

        def used(part: str) -> IntArray:
            index: IntArray = arrays.part_index[part][train]
            present: IntArray = index[index != NO_PART]
            return present

        if texts is not None:
            yield LengthSummary.of(texts.lengths[used("text")], "tokens", title="texts")
        recordings = arrays.recordings
        if recordings is not None and "sound" in self.reader.data.parts:
            lengths = recordings.lengths[used("sound")]
            yield LengthSummary.of(lengths, "seconds", per_unit=recordings.rate, title="recordings")


def unlabelled_modalities(
    data: ModalitiesData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """All examples of an archive, in order; labels are ignored."""
    return ModalitiesPipeline(data.model_copy(update={"path": path}), "labelled", request, tokenizers).unlabelled()


MODALITIES = register(ModalitiesPipeline.data_kind(unlabelled=unlabelled_modalities))
