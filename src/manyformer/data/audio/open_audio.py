"""Opening recordings: converted and written to shards once, then read as batches of log-mel features."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.config import AudioData
from manyformer.data.audio.audio_files import FolderRecordings, TableRecordings, audio_files, open_recordings
from manyformer.data.audio.audio_reading import (
    INT16_SCALE,
    Recording,
    RecordingConverter,
    RecordingSource,
    SelectedRecordings,
    counted_changes,
)
from manyformer.data.audio.log_mel import FrameSettings, FrameStatistics, LogMelFrontEnd
from manyformer.data.audio.utterances import (
    JoinedRecordings,
    RecordingArchive,
    SpecAugment,
    TargetTexts,
    UtteranceDataset,
    UtterancePlan,
    single_utterances,
)
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.data.batching.length_buckets import batches_in_order, check_fills_batch
from manyformer.data.pipeline.file_pipeline import FilePipeline
from manyformer.data.pipeline.kind import OpenRequest, register
from manyformer.data.pipeline.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.summary import DataSummary, ExampleFacts, LengthSummary, folders_of, shown_place
from manyformer.data.storage.cache_folder import PreparationResult, PreparedData
from manyformer.data.storage.token_shards import ShardWriter, TokenShard, open_shard, write_shards
from manyformer.data.text.text_files import describe_folder
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, class_id, train_tokenizer
from manyformer.data.tokenizers.tokenizer import NoTokenizer, Tokenizer

RECORDINGS_PER_BATCH = 16
"""Recordings whose labels or texts are predicted together."""
_SAMPLE_VALUES = 2 * INT16_SCALE
_BYTE_VALUES = 256


class AudioPipeline(FilePipeline[AudioData, RecordingSource, UtterancePlan]):
    """Recordings in the form "labelled", for a classifier, or "transcribed", with the text that is said.

    A batch is bounded by its padded frames. Equal recordings fall into the same split."""

    section = AudioData
    forms = ("labelled", "transcribed")
    sides = ("samples", "text")
    prepared_settings = ("names", "sample_rate", "mels", "window", "hop", "tokenizer", "vocab")

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RecordingSource]:
        role = "label" if self.form == "labelled" else "text"
        return [open_recordings(path, self.data, role) for path in path_list(paths)]

    def split(self) -> Splits[RecordingSource]:
        data = self.data
        groups = {name: values for name in ("test", "valid") if (values := getattr(data, f"{name}_groups")) is not None}
        sources = self.open_sources(data.path, "train")
        if data.header is not None and not any(isinstance(source, TableRecordings) for source in sources):
            raise UserError(
                f"data.header is about a TSV or CSV table, and {path_name(data.path)} is none; leave it out"
            )
        for source in sources:
            if isinstance(source, FolderRecordings):
                source.check_settings()
        if isinstance(data.valid, float):
            shares = {"valid": data.valid}
        else:
            shares = {}
        by_split = {"train": sources}
        for name, paths in (("valid", data.valid), ("test", data.test)):
            if name in groups:
                values = tuple(map(str, groups[name]))
                by_split[name] = [SelectedRecordings(source, values) for source in sources]
            elif paths is not None and not isinstance(paths, float):
                by_split[name] = self.open_sources(paths, name)
        held_out = tuple(str(value) for values in groups.values() for value in values)
        if held_out:
            # whole groups are held out, such as speakers, so that none is heard in training
            by_split["train"] = [SelectedRecordings(source, held_out, excluded=True) for source in sources]
        return Splits(by_split, shares)

    def preparation(self) -> dict[str, Any]:
        # the form decides what the text of a recording is, and joined texts need a tokenizer with spaces
        return {**super().preparation(), "form": self.form, "joined": self.data.joined is not None}

    def library(self) -> str | None:
        return None

    def open(self) -> OpenedData:
        if self.data.joined is not None and self.form == "labelled":
            raise UserError("data.joined is for transcription: joined recordings have no label in common")
        return super().open()

    def prepare(self, splits: Splits[RecordingSource], folder: Path) -> PreparationResult:
        data = self.data
        self.request.log(f"preparing recordings: {splits.source_names()}")
        settings = FrameSettings.of_milliseconds(data.sample_rate, data.mels, data.window, data.hop)
        statistics = FrameStatistics(settings)
        converter = RecordingConverter(data.sample_rate)
        facts = ExampleFacts(splits.names)
        folders = folders_of(source.name for source in splits.sources["train"])
        # the targets of the training recordings, and a location of each one elsewhere
        texts = list[str]()
        held_out = dict[str, str]()
        shard_names = [shard_name for name in splits.names for shard_name in self.shard_names(name)]
        with write_shards(folder, shard_names, _SAMPLE_VALUES) as writers:
            for split, recording in _all_recordings(splits):
                samples = converter.convert(recording)
                # by its samples, so that a copy of a recording is never held out
                name = split or splits.assign(samples.tobytes())
                text = self._target(recording)
                if name == "train":
                    texts.append(text)
                    # of training recordings alone: held-out ones must not decide how features are normalized
                    statistics.add(samples.astype(np.float32) / np.float32(INT16_SCALE))
                else:
                    held_out.setdefault(text, recording.location)
                _add_recording([writers.shards[key] for key in self.shard_names(name)], samples, text)
                place = shown_place(recording.location, folders)
                facts.add(name, len(samples), [place, text], text if self.form == "labelled" else None)
            splits.check_counts(facts.counts, "recordings")
        # after the pass, since shards hold samples and texts as bytes, which need no tokenizer
        self.tokenizers = self._learn(statistics.front_end(), texts)
        for label, location in held_out.items() if self.form == "labelled" else ():
            class_id(self.tokenizers.class_ids(), label, location)
        hashes = {name: shard.sha256 for name, shard in writers.facts.items()}
        seconds = {name: round(sum(lengths) / data.sample_rate) for name, lengths in facts.lengths.items()}
        counts = {"recordings": facts.counts, "seconds": seconds}
        summary = DataSummary(
            noun="recording",
            counts=facts.counts,
            labels=dict(facts.labels) or None,
            left_out=(*splits.found(), *converter.findings()),
            examples=facts.examples,
        )
        return PreparationResult(self.tokenizers, writers.facts, hashes, counts, summary)

    def token_limits(self) -> tuple[int, ...]:
        return _SAMPLE_VALUES, _BYTE_VALUES

    def write_file(self, path: EvaluationPath) -> list[TokenShard]:
        def labelled() -> Iterator[tuple[Recording, str]]:
            class_ids = self.tokenizers.class_ids()
            for recording in self.read_file(path, lambda source: source.recordings()):
                text = self._target(recording)
                if self.form == "labelled":
                    class_id(class_ids, text, recording.location)
                yield recording, text

        return self._write_recordings(labelled())

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # another file need not have the groups by which the run's own recordings were held out
        pipeline = AudioPipeline(self.data.model_copy(update={"group": None}), self.form, self.request, self.tokenizers)
        plan = UtterancePlan(self._archive(pipeline.write_file(path)), self.request.batch_tokens)
        return EvaluationData(path_name(path), HeldOutBatches(plan.fixed_epoch(), None))

    def plan(self, shards: Sequence[TokenShard], split: str) -> UtterancePlan:
        data = self.data
        archive = self._archive(shards)
        budget = self.request.batch_tokens
        joined = None
        if data.joined is not None:
            shortest, longest = (round(seconds * self.front_end.settings.sample_rate) for seconds in data.silence)
            joined = JoinedRecordings(data.joined, (shortest, longest))
            if shards[0].facts.documents < data.joined[0]:
                count = shards[0].facts.documents
                raise UserError(f"data.joined is {data.joined[0]} recordings at least, and a split has {count}")
        if split != "train":
            return UtterancePlan(archive, budget, joined=joined)
        masks = SpecAugment(
            data.frequency_masks,
            data.frequency_mask_width,
            data.time_masks,
            data.time_mask_width,
            data.time_mask_share,
        )
        # at every opening: another limit needs no new preparation
        limit = data.max_seconds * self.front_end.settings.sample_rate
        plan = UtterancePlan(
            archive, budget, joined=joined, masks=masks, recordings=np.flatnonzero(shards[0].lengths <= limit)
        )
        self._check_training(plan, shards[0])
        return plan

    def required_keywords(self) -> dict[str, int]:
        mels = self.front_end.settings.mels
        if self.form == "labelled":
            return {"mels": mels, "classes": len(self.tokenizers.labels or ())}
        return {"mels": mels, "vocab": self.tokenizers.target.vocab}

    def length_limits(self, plans: Mapping[str, UtterancePlan]) -> Iterable[LengthLimit]:
        longest = max(plan.max_length for plan in plans.values())
        remedy = "split long recordings, or build a longer model"
        return [LengthLimit(longest, "the longest recording (of frames)", remedy)]

    def describe(
        self, splits: Splits[RecordingSource], prepared: PreparedData, plans: Mapping[str, UtterancePlan]
    ) -> Iterator[str]:
        settings = self.front_end.settings
        data = self.data
        counts = prepared.counts
        labels = self.tokenizers.labels
        vocabulary = f"{data.tokenizer} tokens, vocabulary {self.tokenizers.target.vocab:,}"
        yield f"recordings: {splits.source_names()}; {vocabulary if labels is None else f'{len(labels):,} labels'}"
        for folder in filter(Path.is_dir, map(Path, path_list(data.path))):
            yield describe_folder(folder, audio_files(folder))
        yield f"frames: {settings.mels} mel bands at {settings.sample_rate:,} Hz, {data.window:g} ms every {data.hop:g}"
        sizes = {name: f"{count:,} recordings" for name, count in counts["recordings"].items()}
        sizes = {name: f"{size} ({counts['seconds'][name]:,} s)" for name, size in sizes.items()}
        yield "; ".join(f"{name}: {size}" for name, size in sizes.items())
        yield from splits.notes()

    def summarize(
        self, splits: Splits[RecordingSource], prepared: PreparedData, plans: Mapping[str, UtterancePlan]
    ) -> DataSummary:
        rate = self.front_end.settings.sample_rate
        counts = prepared.counts
        summary = prepared.summary
        if summary is None:
            # files that earlier versions prepared have the counts alone
            changes = tuple(counted_changes(counts, rate))
            summary = DataSummary("recording", counts["recordings"], left_out=changes)
        samples = self.shards_of(prepared, "train")[0].lengths
        lengths = LengthSummary.of(
            samples,
            "seconds",
            per_unit=rate,
            limit=self.data.max_seconds,
            setting="data.max_seconds",
            fate="left out",
        )
        return summary._replace(lengths=lengths)

    def unlabelled(self, path: str) -> UnlabelledData:
        """The recordings of files as batches in their order, with placeholders as targets."""
        inputs = []
        # batches have targets, which nobody looks at
        placeholder = (self.tokenizers.labels or ("",))[0]

        def recordings() -> Iterator[tuple[Recording, str]]:
            for recording in self.read_file(path, lambda source: source.recordings()):
                inputs.append(UnlabelledInput(recording.location, is_file=True))
                yield recording, placeholder

        archive = self._archive(self._write_recordings(recordings()))
        dataset = UtteranceDataset(archive, single_utterances(np.arange(len(inputs))))
        return UnlabelledData(inputs, batches_in_order(dataset, RECORDINGS_PER_BATCH))

    @property
    def front_end(self) -> LogMelFrontEnd:
        """The front end that computes features."""
        assert isinstance(self.tokenizers.source, LogMelFrontEnd)
        return self.tokenizers.source

    def _archive(self, shards: Sequence[TokenShard]) -> RecordingArchive:
        class_ids = None
        if self.form == "labelled":
            class_ids = self.tokenizers.class_ids()
        return RecordingArchive(shards[0], TargetTexts(shards[1], self.tokenizers.target, class_ids), self.front_end)

    def _target(self, recording: Recording) -> str:
        """The label or text of a recording. Raises UserError if it has none."""
        if recording.target is None or (self.form == "labelled" and not recording.target):
            raise UserError(f"{recording.location}: this recording has no label, the name of the folder that it is in")
        return recording.target

    def _learn(self, front_end: LogMelFrontEnd, texts: Sequence[str]) -> TokenizerPair:
        """The front end, with the labels, or with a tokenizer of the training texts."""
        if self.form == "labelled":
            labels = tuple(sorted(set(texts)))
            if len(labels) == 1:
                raise UserError(f"all training recordings have the label {labels[0]!r}; there must be two labels")
            return TokenizerPair(front_end, NoTokenizer(), labels)
        # joined texts are separated by spaces, which belong to the vocabulary then
        learned = [f"{text} {text}" for text in texts] if self.data.joined is not None else texts
        target: Tokenizer = train_tokenizer(self.data.tokenizer, learned, self.data.vocab)
        return TokenizerPair(front_end, target)

    def _write_recordings(self, recordings: Iterable[tuple[Recording, str]]) -> list[TokenShard]:
        converter = RecordingConverter(self.front_end.settings.sample_rate)
        with write_shards(self.request.cache, self.sides, _SAMPLE_VALUES) as writers:
            for recording, text in recordings:
                _add_recording(list(writers.shards.values()), converter.convert(recording), text)
        self.log_findings(converter.findings())
        return [open_shard(self.request.cache, side, facts) for side, facts in writers.facts.items()]

    def _check_training(self, plan: UtterancePlan, samples: TokenShard) -> None:
        """Raise UserError if no training recording is short enough, or if they fill no batch or do not fit one."""
        budget = self.request.batch_tokens
        count = len(plan.recordings)
        if not count:
            raise UserError(f"no training recording is as short as data.max_seconds ({self.data.max_seconds:g})")
        if plan.max_length > budget:
            raise UserError(
                f"the longest training utterance can have {plan.max_length:,} frames, more than a batch of {budget:,} "
                "(batch.tokens); set batch.tokens higher or data.max_seconds lower"
            )
        total = int(self.front_end.settings.frame_counts(samples.lengths[plan.recordings]).sum())
        check_fills_batch(total, budget, f"the {count:,} training recordings have", "recordings", unit="frames")


def _all_recordings(splits: Splits[RecordingSource]) -> Iterator[tuple[str, Recording]]:
    """Every recording with its split, "" for those of training data of which a share is held out."""
    for name, sources in splits.sources.items():
        for source in sources:
            for recording in source.recordings():
                yield "" if name == "train" and splits.shares else name, recording


def _add_recording(writers: Sequence[ShardWriter], samples: NDArray[np.int16], text: str) -> None:
    # shards hold no negative numbers
    writers[0].add(samples.astype(np.int32) + INT16_SCALE, starts_document=True)
    writers[1].add(np.frombuffer(text.encode(), dtype=np.uint8), starts_document=True)


def unlabelled_recordings(
    data: AudioData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """The recordings of a file, or of files in any format of training data; labels are ignored."""
    form = "labelled"
    if tokenizers.labels is None:
        form = "transcribed"
    plain = data.model_copy(update={"names": None, "group": None})
    return AudioPipeline(plain, form, request, tokenizers).unlabelled(path)


AUDIO = register(AudioPipeline.data_kind(unlabelled=unlabelled_recordings))
