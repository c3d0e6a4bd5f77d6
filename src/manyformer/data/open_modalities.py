"""Opening examples of several parts: read and checked once, then split and read as batches."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manyformer.config import ModalitiesData
from manyformer.data.array_archives import hash_arrays
from manyformer.data.array_checks import NO_LABEL, complete_splits, count_labels, find_items, unused_items
from manyformer.data.audio_reading import INT16_SCALE
from manyformer.data.cache_folder import RECORD_FILE, PreparationResult, load_or_prepare, load_prepared, read_record
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.example_facts import ExampleFacts
from manyformer.data.kind import DataKind, OpenRequest, register
from manyformer.data.log_mel import FrameSettings, FrameStatistics, LogMelFrontEnd
from manyformer.data.modality_archive import NO_PART, ModalityArrays, RecordingArrays, read_modality_archive
from manyformer.data.modality_batches import (
    CaptionReader,
    ContrastReader,
    EncodedTexts,
    ExampleEpoch,
    ExamplePlan,
    ExampleReader,
    ExampleSet,
    FrontEndRecordings,
    LabelReader,
    rows_of_batch,
)
from manyformer.data.no_tokenizer import NoTokenizer
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    HeldOutExample,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.summary import DataSummary, LengthSummary
from manyformer.data.text_files import existing_path, file_stamp
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.tokenizer_kinds import train_tokenizer
from manyformer.errors import UserError, list_names
from manyformer.files.json_records import DamagedFile
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.type_aliases import IntArray

EXAMPLES_FILE = "examples.npz"
READERS: dict[str, Callable[[ExampleSet], ExampleReader]] = {
    "captions": CaptionReader,
    "labelled": LabelReader,
    "contrast": ContrastReader,
}
"""What reads the examples in each form."""


def open_modalities(data: ModalitiesData, form: str, request: OpenRequest) -> OpenedData:
    """Open examples for training; prepared files are reused if the archive has not changed."""
    arrays, tokenizers, fingerprint = _load_or_prepare(data, request)
    reader, splits = _reader(data, form, arrays, tokenizers), _split(arrays, data)
    usable = {name: _usable(reader, split, f"{data.path}: the {name} data") for name, split in splits.items()}
    settings = f"{fingerprint}-{form}-{reader.data.parts}-{tokenizers.fingerprint}"
    plan = ExamplePlan(reader, usable["train"], request.batch_tokens, data.part_dropout, settings)
    held_out = {name: _held_out_batches(reader, usable[name], request) for name in usable if name != "train"}
    required = {"captions": {"vocab": tokenizers.target.vocab}, "labelled": {"classes": len(arrays.label_names)}}
    return OpenedData(
        tokenizers=tokenizers,
        train=Sampler(plan, request.seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, reader.data, usable)),
        summary=_summarize(reader.data, form, splits, usable),
        length_limits=(),
        cache=request.cache,
        required_keywords=required.get(form, {}),
        offered_keywords=_offered_keywords(reader.data, tokenizers),
    )


def held_out_modalities(data: ModalitiesData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The held-out examples of a run."""
    arrays, tokenizers, _ = _load_or_prepare(data, request)
    splits = _split(arrays, data)
    name = split or ("test" if "test" in splits else "valid")
    if name not in splits:
        raise UserError(f"the run in {request.cache.parent} has no {name} data; its archive names none")
    return _evaluation_data(name, _reader(data, form, arrays, tokenizers), splits[name], request)


def modalities_of_file(
    data: ModalitiesData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The test examples of another archive, or all of them. Raises UserError for labels that the model lacks."""
    arrays = read_modality_archive(existing_path(path_name(path)), request.log)
    if form == "labelled" and arrays.label_names != (tokenizers.labels or ()):
        raise UserError(f"{path_name(path)}: its labels are {arrays.label_names}, the model's {tokenizers.labels}")
    split = arrays.splits.get("test", np.arange(len(arrays.labels)))
    reader = _reader(data.model_copy(update={"path": path_name(path)}), form, arrays, tokenizers)
    return _evaluation_data(path_name(path), reader, split, request)


def unlabelled_modalities(
    data: ModalitiesData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """All examples of an archive, in order; labels are ignored."""
    arrays = read_modality_archive(existing_path(path), request.log)
    arrays = arrays._replace(labels=np.zeros_like(arrays.labels))
    reader = _reader(data.model_copy(update={"path": path}), "labelled", arrays, tokenizers)
    examples = np.arange(len(arrays.labels))
    inputs = [UnlabelledInput(f"{path}: example {example}", is_file=True) for example in examples]
    return UnlabelledData(inputs, _held_out_batches(reader, examples, request))


def _evaluation_data(name: str, reader: ExampleReader, split: IntArray, request: OpenRequest) -> EvaluationData:
    usable = _usable(reader, split, name)
    arrays, examples = reader.data.arrays, tuple[HeldOutExample, ...]()
    if arrays.texts is not None and "text" in reader.data.parts:
        texts = arrays.texts[arrays.part_index["text"][usable]].tolist()
        examples = tuple(
            HeldOutExample(f"example {number}", text, f"{name}: example {number}")
            for number, text in zip(usable.tolist(), texts, strict=True)
        )
    return EvaluationData(name, _held_out_batches(reader, usable, request), examples)


def _usable(reader: ExampleReader, split: IntArray, subject: str) -> IntArray:
    """The examples of a split that have what is read. Raises UserError if there are none."""
    usable = reader.usable(split)
    if not len(usable):
        raise UserError(f"{subject} has no example with what this model reads: {', '.join(reader.data.parts)}")
    return usable


def _load_or_prepare(data: ModalitiesData, request: OpenRequest) -> tuple[ModalityArrays, TokenizerPair, str]:
    """The examples, from the prepared file if there is one of the same archive, their tokenizers, and a hash."""

    def prepare(folder: Path) -> PreparationResult:
        arrays = read_modality_archive(existing_path(data.path), request.log)
        arrays.write(folder / EXAMPLES_FILE)
        digest = hash_arrays(arrays.to_arrays())
        previous = read_record(request.cache) if request.belongs_to_model else None
        if previous is not None and previous.sources.get(EXAMPLES_FILE) != digest:
            raise UserError(
                f"{data.path}: these examples are others than those that this run was trained on; restore the previous "
                "data, or start a new run"
            )
        return PreparationResult(_train_tokenizers(arrays, data), {}, {EXAMPLES_FILE: digest}, {})

    # the data of a trained model is complete without the archive that it was prepared from
    if request.belongs_to_model and request.tokenizers is not None and load_prepared(request.cache) is not None:
        record = read_record(request.cache)
    else:
        settings = {
            name: getattr(data, name) for name in ("kind", "tokenizer", "vocab", "valid", "mels", "window", "hop")
        }
        settings["stamps"] = file_stamp(existing_path(data.path))
        load_or_prepare(request.cache, settings, prepare, belongs_to_model=request.belongs_to_model, log=request.log)
        record = read_record(request.cache)
    prepared = load_prepared(request.cache)
    assert record is not None
    assert prepared is not None
    return _read_prepared(request.cache), prepared.tokenizers, record.sources[EXAMPLES_FILE]


def _read_prepared(cache: Path) -> ModalityArrays:
    """The prepared examples, whose file is as it was written. Raises DamagedFile."""
    files = VerifiedFolder.open(cache)
    if EXAMPLES_FILE not in files:
        raise DamagedFile(f"{cache / RECORD_FILE} is damaged: there is no {EXAMPLES_FILE} beside it")
    return read_modality_archive(files.file(EXAMPLES_FILE))


def _train_tokenizers(arrays: ModalityArrays, data: ModalitiesData) -> TokenizerPair:
    """What reads the recordings, a tokenizer of the texts, both of training examples, and the names of the labels."""
    train, none = _split(arrays, data)["train"], NoTokenizer()
    used = {part: np.unique(index[train][index[train] != NO_PART]) for part, index in arrays.part_index.items()}
    front_end = none if arrays.recordings is None else _train_front_end(arrays.recordings, used["sound"], data)
    tokenizer: Tokenizer = none
    if arrays.texts is not None:
        tokenizer = train_tokenizer(data.tokenizer, arrays.texts[used["text"]].tolist(), data.vocab)
    return TokenizerPair(front_end, tokenizer, arrays.label_names or None)


def _train_front_end(recordings: RecordingArrays, used: IntArray, data: ModalitiesData) -> LogMelFrontEnd:
    """The front end with the mean and deviation of the bands of these recordings."""
    samples, lengths, rate = recordings
    statistics = FrameStatistics(FrameSettings.of_milliseconds(rate, data.mels, data.window, data.hop))
    stops = lengths.cumsum()
    for recording in used:
        levels = samples[stops[recording] - lengths[recording] : stops[recording]]
        statistics.add(levels.astype(np.float32) / np.float32(INT16_SCALE))
    return statistics.front_end()


def _reader(data: ModalitiesData, form: str, arrays: ModalityArrays, tokenizers: TokenizerPair) -> ExampleReader:
    """What reads the examples in this form. Raises UserError for parts that the archive or the form does not have."""
    parts: tuple[str, ...] = tuple(arrays.part_index) if data.parts is None else data.parts
    if form == "captions":
        parts = ("image", "text")
    for part in parts:
        if part not in arrays.part_index:
            raise UserError(f"{data.path}: there is no {part} in it, but only {list_names(arrays.part_index)}")
    if form == "contrast" and len(parts) != 2:
        raise UserError(f"data.parts must be the two parts that are compared, and is {', '.join(parts)}")
    if form == "labelled" and not arrays.label_names:
        raise UserError(f"{data.path}: there is no array labels in it, which a classifier learns")
    texts = None
    if "text" in parts:
        assert arrays.texts is not None
        texts = EncodedTexts(arrays.texts.tolist(), tokenizers.target)
    recordings = _recordings(arrays, tokenizers.source, data.path) if "sound" in parts else None
    return READERS[form](ExampleSet(arrays, texts, recordings, parts))


def _recordings(arrays: ModalityArrays, front_end: Tokenizer, name: str) -> FrontEndRecordings:
    assert arrays.recordings is not None
    assert isinstance(front_end, LogMelFrontEnd)
    rate = front_end.settings.sample_rate
    if arrays.recordings.rate != rate:
        raise UserError(
            f"{name}: its recordings have {arrays.recordings.rate:,} samples a second, and those of the model "
            f"{rate:,}; resample them"
        )
    return FrontEndRecordings(arrays.recordings, front_end)


def _split(arrays: ModalityArrays, data: ModalitiesData) -> dict[str, IntArray]:
    return complete_splits(arrays.splits, np.flatnonzero(arrays.labels != NO_LABEL), data.valid, data.path)


def _held_out_batches(reader: ExampleReader, examples: IntArray, request: OpenRequest) -> HeldOutBatches:
    rows = rows_of_batch(reader, examples, request.batch_tokens)
    return HeldOutBatches(ExampleEpoch(reader, examples, rows), None)


def _offered_keywords(data: ExampleSet, tokenizers: TokenizerPair) -> dict[str, int | None]:
    """The sizes of the parts that are read, None for those of others."""
    keywords: dict[str, int | None] = dict.fromkeys(("height", "width", "channels", "mels", "vocab"))
    if "image" in data.parts:
        assert data.arrays.images is not None
        keywords |= dict(zip(("height", "width", "channels"), data.arrays.images.shape[1:], strict=True))
    if data.recordings is not None:
        keywords["mels"] = data.recordings.front_end.settings.mels
    if "text" in data.parts:
        keywords["vocab"] = tokenizers.target.vocab
    return keywords


def _summary_lines(data: ModalitiesData, examples: ExampleSet, usable: dict[str, IntArray]) -> Iterator[str]:
    arrays = examples.arrays
    labels = f"; {len(arrays.label_names):,} labels" if arrays.label_names else ""
    yield f"examples of several parts: {data.path}; {len(arrays.labels):,} examples{labels}"
    counts: dict[str, Any] = {part: int((arrays.part_index[part] >= 0).sum()) for part in examples.parts}
    yield "parts: " + "; ".join(f"{count:,} with {part}" for part, count in counts.items())
    yield "; ".join(f"{name}: {len(split):,} examples" for name, split in usable.items())


def _summarize(
    examples: ExampleSet, form: str, splits: dict[str, IntArray], usable: dict[str, IntArray]
) -> DataSummary:
    """What a person can check of the examples."""
    arrays, train = examples.arrays, usable["train"]
    labels = arrays.labels if form == "labelled" else np.zeros_like(arrays.labels)
    lacks_part = np.zeros(len(labels), dtype=bool)
    for name, split in splits.items():
        lacks_part[np.setdiff1d(split, usable[name])] = True
    # a classifier reads what is there of an example, others need all of it
    reason = f"left out for lack of {(' and ' if form == 'labelled' else ' or ').join(examples.parts)}"
    facts = ExampleFacts(["train"])
    for example in train:
        label = arrays.label_names[labels[example]] if form == "labelled" else None
        facts.show(list(_shown_parts(examples, int(example), label)), label)
    return DataSummary(
        noun="example",
        counts={name: len(split) for name, split in usable.items()},
        labels=count_labels(labels[train], arrays.label_names) if form == "labelled" else None,
        left_out=(
            *find_items(lacks_part & (labels != NO_LABEL), "example", reason),
            *unused_items(splits, labels, "example"),
        ),
        examples=facts.examples,
        other_lengths=tuple(_part_lengths(examples, train)),
    )


def _shown_parts(examples: ExampleSet, example: int, label: str | None) -> Iterator[str]:
    """What a person is shown of an example: its number, its text and its label."""
    arrays = examples.arrays
    yield f"example {example}"
    if arrays.texts is not None and "text" in examples.parts:
        text = arrays.part_index["text"][example]
        yield "no text" if text == NO_PART else str(arrays.texts[text])
    if label is not None:
        yield label


def _part_lengths(examples: ExampleSet, train: IntArray) -> Iterator[LengthSummary]:
    """The lengths of the parts of training examples that have one."""

    def used(part: str) -> IntArray:
        index: IntArray = examples.arrays.part_index[part][train]
        present: IntArray = index[index != NO_PART]
        return present

    if examples.texts is not None:
        yield LengthSummary.of(examples.texts.lengths[used("text")], "tokens", title="texts")
    if examples.arrays.recordings is not None and "sound" in examples.parts:
        _, lengths, rate = examples.arrays.recordings
        yield LengthSummary.of(lengths[used("sound")], "seconds", per_unit=rate, title="recordings")


MODALITIES = register(
    DataKind(
        section=ModalitiesData,
        forms=tuple(READERS),
        open=open_modalities,
        held_out=held_out_modalities,
        from_file=modalities_of_file,
        unlabelled=unlabelled_modalities,
    )
)
