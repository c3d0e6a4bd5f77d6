"""What is said of images, recordings, graphs, examples of parts and episodes before training, against their sources."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from manyformer.base.errors import UserError
from manyformer.config import AudioData, GraphsData, ImagesData, ModalitiesData, PairsData, TrajectoriesData
from manyformer.config.data_sections.data_section import DataSection
from manyformer.data import OpenedData, open_data
from manyformer.data.pipeline.summary import DataSummary, LengthSummary

RATE = 8000


def opened(section: DataSection, form: str, cache: Path, batch: int = 64) -> OpenedData:
    return open_data(section, form, batch_tokens=batch, cache=cache, seed=0)


def summary_of(data: OpenedData) -> DataSummary:
    """The summary, whose lines are told, printable and narrow; as plain values it is JSON."""
    assert data.summary is not None
    lines = data.describe()
    assert all(line in lines for line in data.summary.facts())
    assert len(set(lines)) == len(lines)
    # a path is never broken
    assert all(len(text) <= 71 or "/" in text for _, text in data.glance())
    json.dumps(data.summary.as_json())
    return data.summary


def without_summary(cache: Path) -> None:
    """Make the prepared files those of a version that wrote no summary."""
    from manyformer.base.files.verified_folder import write_manifest
    from manyformer.data.storage.cache_folder import PreparedRecord

    record = PreparedRecord.read(cache / "prepared.json")
    record.model_copy(update={"summary": None}).write(cache / "prepared.json")
    write_manifest(cache)


def photos(folder: Path) -> Path:
    for number in range(24):
        label = "cat" if number % 3 else "dog"
        (folder / label).mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (4 + number, 10, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / label / f"{number:02}.png")
    return folder


def test_images_have_their_labels_sizes_and_changes_told(tmp_path: Path) -> None:
    folder = photos(tmp_path / "pets")
    section = ImagesData(path=str(folder), size=8, valid=0.3)
    data = opened(section, "labelled", tmp_path / "cache", batch=192)
    facts = summary_of(data)
    assert sum(facts.counts.values()) == 24
    # the labels are those of training images, which are all that the valid ones are not
    assert facts.labels is not None
    assert sum(facts.labels.values()) == facts.counts["train"]
    sizes = [max(4 + number, 10) for number in range(24)]
    assert facts.lengths is not None
    assert (facts.lengths.median, facts.lengths.largest) == (int(np.median(sizes)), max(sizes))
    found = {finding.what: finding for finding in facts.left_out}
    # no image has both sides of 8 or more but those of a height from 8 on, and 10 is the width of all
    enlarged = [f"{folder}/{'cat' if number % 3 else 'dog'}/{number:02}.png" for number in range(4)]
    assert found["images enlarged"].number == len(enlarged)
    assert found["images enlarged"].first == sorted(enlarged)[0]
    assert found["images stretched to another ratio of height and width"].number == 23
    assert {example[1] for example in facts.examples} == {"cat", "dog"}
    for place, label in facts.examples:
        assert (tmp_path / place).is_file()
        assert Path(place).parent.name == label


def test_images_of_one_size_and_a_language_model_of_them_have_no_sizes_and_labels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(30) % 2)
    data = opened(ImagesData(path=str(tmp_path / "a.npz"), valid=0.3), "levels", tmp_path / "cache", batch=32)
    facts = summary_of(data)
    assert facts.lengths is None
    assert facts.labels is None
    assert [place.split()[0] for (place,) in facts.examples] == ["a.npz:"] * 3


def test_images_that_an_earlier_version_prepared_open_without_a_summary(tmp_path: Path) -> None:
    section = ImagesData(path=str(photos(tmp_path / "pets")), size=8, valid=0.3)
    before = opened(section, "labelled", tmp_path / "cache", batch=192)
    without_summary(tmp_path / "cache")
    again = opened(section, "labelled", tmp_path / "cache", batch=192)
    assert before.summary is not None
    assert summary_of(again) == DataSummary("image", before.summary.counts)


def table_of_words(folder: Path, header: tuple[str, ...] | None, columns: tuple[int, ...] = (0, 1, 2)) -> Path:
    """A table of 24 tones, from 0.1 s on in steps of 0.05 s, with a label and a speaker."""
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    lines = [] if header is None else [",".join(header)]
    for number in range(24):
        samples = 0.4 * np.sin(np.arange(round(RATE * (0.1 + 0.05 * number))) * 0.2 * (1 + number % 2))
        soundfile.write(folder / "wavs" / f"{number}.wav", samples, RATE)
        row = (f"wavs/{number}.wav", ("yes", "no")[number % 2], f"s{number % 4}")
        lines.append(",".join(row[column] for column in columns))
    (folder / "words.csv").write_text("\n".join(lines) + "\n")
    return folder / "words.csv"


def recordings(path: Path, cache: Path, form: str = "labelled", **settings: Any) -> OpenedData:
    section = AudioData(**({"path": str(path), "sample_rate": RATE, "mels": 8, "valid": 0.2} | settings))
    return opened(section, form, cache, batch=200)


def test_recordings_have_their_labels_seconds_and_what_is_left_out_told(tmp_path: Path) -> None:
    path = table_of_words(tmp_path, None)
    path.write_text(path.read_text() + "\n")
    settings = {"group": 2, "valid_groups": ["s0"], "valid": None}
    data = recordings(path, tmp_path / "cache", max_seconds=1.0, **settings)
    facts = summary_of(data)
    assert facts.counts == {"train": 18, "valid": 6}
    assert facts.labels == {"no": 12, "yes": 6}
    seconds = [soundfile.info(tmp_path / "wavs" / f"{number}.wav").duration for number in range(24) if number % 4]
    assert facts.lengths is not None
    assert facts.lengths.median == pytest.approx(np.median(seconds), abs=1e-3)
    assert facts.lengths.largest == pytest.approx(max(seconds), abs=1e-3)
    assert facts.lengths.beyond == sum(length > 1.0 for length in seconds)
    assert [str(finding) for finding in facts.left_out] == [f"1 blank line left out (first: {path}:25)"]
    assert facts.examples[0] == ("words.csv:2 (wavs/1.wav)", "no")
    (warning,) = facts.warnings()
    assert "are left out at 1 seconds" in warning
    # what is left out follows the setting, not the one that the files were prepared with
    again = summary_of(recordings(path, tmp_path / "cache", max_seconds=30, **settings))
    assert again.lengths is not None
    assert (again.lengths.beyond, again.lengths.limit) == (0, 30)
    without_summary(tmp_path / "cache")
    old = summary_of(recordings(path, tmp_path / "cache", max_seconds=1.0, **settings))
    assert old == DataSummary("recording", facts.counts, lengths=facts.lengths)


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        (("path", "label", "speaker"), (0, 1, 2)),
        (("speaker", "label", "file"), (2, 1, 0)),
        (("label", "speaker", "audio"), (1, 2, 0)),
        (None, (0, 1, 2)),
    ],
)
def test_the_columns_of_a_table_of_recordings_are_found_by_their_names(
    tmp_path: Path, header: tuple[str, ...] | None, columns: tuple[int, ...]
) -> None:
    path = table_of_words(tmp_path, header, columns)
    data = recordings(path, tmp_path / "cache")
    assert data.labels == ("no", "yes")
    assert sum(summary_of(data).counts.values()) == 24
    assert any("taken as a header (audio: " in line for line in data.describe()) == (header is not None)


def test_a_table_of_transcripts_with_a_header_has_its_texts_read(tmp_path: Path) -> None:
    path = table_of_words(tmp_path, ("client_id", "path", "sentence"), (2, 0, 1))
    data = recordings(path, tmp_path / "cache", "transcribed")
    assert {text for _, text in summary_of(data).examples} <= {"yes", "no"}
    assert sum(summary_of(data).counts.values()) == 24


def test_a_header_of_recordings_without_usual_names_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = table_of_words(tmp_path, ("aa", "bb", "cc"))
    with pytest.raises(UserError, match=r"words.csv:1: there is no recording .*/aa; .* set data.header=true"):
        recordings(path, tmp_path / "cache")
    assert sum(summary_of(recordings(path, tmp_path / "cache", header=True)).counts.values()) == 24
    with pytest.raises(UserError, match=r"data\.header is about a TSV or CSV table"):
        recordings(tmp_path / "wavs", tmp_path / "other", header=True)


def test_graphs_have_their_labels_and_the_nodes_that_are_not_learned_told(tmp_path: Path) -> None:
    labels = np.array([0, 1, 1, -1, 0, 1])
    arrays = {"edges": np.array([[0, 1], [1, 2], [3, 4]]), "features": np.eye(6, dtype=np.float32)}
    splits = {"train": np.array([0, 1, 2]), "valid": np.array([4])}
    np.savez(tmp_path / "a.npz", labels=labels, label_names=np.array(["red", "blue"]), **arrays, **splits)
    data = opened(GraphsData(path=str(tmp_path / "a.npz")), "nodes", tmp_path / "cache")
    facts = summary_of(data)
    assert facts.counts == {"train": 3, "valid": 1}
    assert facts.labels == {"red": 1, "blue": 2}
    assert facts.lengths is None
    assert [str(finding) for finding in facts.left_out] == [
        "1 node without a label (first: node 3)",
        "1 node in no split, neither learned nor scored (first: node 5)",
        "1 node without an edge (first: node 5)",
    ]
    assert facts.examples == (("node 0", "red"), ("node 1", "blue"), ("node 2", "blue"))


def test_the_sizes_of_several_graphs_are_told(tmp_path: Path) -> None:
    counts = np.array([2, 3, 7, 4])
    features, edges = np.ones((16, 2), dtype=np.float32), np.array([[0, 1], [2, 3]])
    np.savez(tmp_path / "a.npz", edges=edges, features=features, labels=np.array([0, 1, 0, 1]), node_counts=counts)
    data = opened(GraphsData(path=str(tmp_path / "a.npz"), valid=0.25), "graphs", tmp_path / "cache")
    facts = summary_of(data)
    assert "graphs: median 3, largest 7 nodes" in data.describe()
    assert facts.counts == {"train": 3, "valid": 1}
    assert {example[0] for example in facts.examples} < {f"graph {number}" for number in range(4)}


def test_examples_of_parts_have_their_labels_lengths_and_missing_parts_told(tmp_path: Path) -> None:
    samples = np.zeros(4000, dtype=np.int16)
    sounds = {"samples": samples, "lengths": np.array([1000, 3000]), "sample_rate": np.array(RATE)}
    sounds["sound_index"] = np.array([0, 1, 0, 1, 0, 1])
    texts = {"texts": np.array(["ab", "abcd"]), "text_index": np.array([0, 1, -1, -1, 0, 1])}
    splits = {"train": np.arange(4), "valid": np.array([4])}
    np.savez(tmp_path / "a.npz", labels=np.array([0, 1, 1, 0, 0, 1]), **sounds, **texts, **splits)
    section = ModalitiesData(path=str(tmp_path / "a.npz"), tokenizer="char")
    facts = summary_of(opened(section, "contrast", tmp_path / "cache"))
    assert facts.counts == {"train": 2, "valid": 1}
    assert facts.labels is None
    assert facts.other_lengths == (
        LengthSummary("tokens", 3, 4, 2, title="texts"),
        LengthSummary("seconds", 0.25, 0.375, 2, title="recordings"),
    )
    assert [str(finding) for finding in facts.left_out] == [
        "2 examples left out for lack of sound or text (first: example 2)",
        "1 example in no split, neither learned nor scored (first: example 5)",
    ]
    labelled = summary_of(opened(section, "labelled", tmp_path / "cache"))
    assert labelled.labels == {"0": 2, "1": 2}
    assert [finding.first for finding in labelled.left_out] == ["example 5"]
    assert labelled.examples == (("example 0", "ab", "0"), ("example 1", "abcd", "1"), ("example 2", "no text", "1"))
    of_text = section.model_copy(update={"parts": ("text",)})
    alone = summary_of(opened(of_text, "labelled", tmp_path / "cache"))
    assert str(alone.left_out[0]) == "2 examples left out for lack of text (first: example 2)"
    assert alone.labels == {"0": 1, "1": 1}


def test_episodes_have_their_steps_told(tmp_path: Path) -> None:
    lengths = np.array([3, 5, 4, 9, 2])
    steps = {"observations": np.ones((23, 2), dtype=np.float32), "actions": np.arange(23) % 2}
    np.savez(tmp_path / "a.npz", rewards=np.ones(23, dtype=np.float32), lengths=lengths, **steps)
    section = TrajectoriesData(path=str(tmp_path / "a.npz"), length=4, valid=0.2)
    data = opened(section, "windows", tmp_path / "cache")
    facts = summary_of(data)
    assert facts.counts == {"train": 4, "valid": 1}
    assert facts.lengths is not None
    assert facts.lengths.largest in lengths
    # every step has a reward of 1
    assert all(example[0] == f"{example[1].removeprefix('return ')} time steps" for example in facts.examples)


def test_a_limit_that_leaves_rows_out_is_the_present_one_with_prepared_files(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"{'x' * number}\t{'y' * number}\n" for number in range(1, 61)))
    for limit in (30, 50):
        section = PairsData(path=str(tmp_path / "a.tsv"), tokenizer="char", valid=0.1, max_length=limit)
        facts = summary_of(opened(section, "pairs", tmp_path / "cache", batch=128))
        assert facts.lengths is not None
        assert facts.lengths.limit == limit
        assert facts.lengths.beyond <= 61 - limit
    without_summary(tmp_path / "cache")
    old = summary_of(opened(section, "pairs", tmp_path / "cache", batch=128))
    assert old.lengths == facts.lengths
