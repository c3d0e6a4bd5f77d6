"""Every kind of data gives the same batches ahead of their turn, while validation data of the same files is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyformer.config import DATA_SECTIONS, RunConfig
from manyformer.data import open_data
from manyformer.data.pipeline.opened import OpenedData
from manyformer.nn.batches import Batch
from manyformer.nn.core import tree_map
from manyformer.training.ahead_feed import AheadFeed, PreparedBatch

PHRASES = [
    f"{count} {noun} sit here ." for count in ("two", "three", "four", "six") for noun in ("men", "dogs", "cats")
]
TREE = (
    "1\t{0}\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_\n2\tsee\t_\tVERB\t_\t_\t0\troot\t_\t_\n3\t{1}\t_\tNOUN\t_\t_\t2\tobj\t_\t_\n"
)
SEED = 7


def write_text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("\n\n".join(PHRASES * 12))
    return str(path)


def write_pairs(folder: Path) -> list[str]:
    for name, step in (("a.en", 1), ("a.de", -1)):
        (folder / name).write_text("".join(f"{phrase[::step]}\n" for phrase in PHRASES * 4))
    return [str(folder / "a.en"), str(folder / "a.de")]


def write_labels(folder: Path) -> str:
    path = folder / "texts.tsv"
    path.write_text("".join(f"{phrase}\t{phrase[:2]}\n" for phrase in PHRASES * 4))
    return str(path)


def write_two_texts(folder: Path) -> str:
    path = folder / "pairs.tsv"
    path.write_text("".join(f"{phrase}\t{phrase[::-1]}\t{phrase[:2]}\n" for phrase in PHRASES * 4))
    return str(path)


def write_questions(folder: Path) -> str:
    rows = [{"document": phrase, "question": "how many?", "answer": phrase.split()[0]} for phrase in PHRASES * 4]
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def write_trees(folder: Path) -> str:
    path = folder / "trees.conllu"
    path.write_text("\n".join(TREE.format(chr(97 + number // 26), chr(97 + number % 26)) for number in range(200)))
    return str(path)


def write_images(folder: Path) -> str:
    images = np.random.default_rng(SEED).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.savez(
        folder / "images.npz", x_train=images, y_train=np.arange(40) % 2, x_test=images[:8], y_test=np.arange(8) % 2
    )
    return str(folder / "images.npz")


def write_recordings(folder: Path) -> str:
    lengths = 800 + 80 * (np.arange(24) % 5)
    arrays = {
        "samples": np.random.default_rng(SEED).normal(0, 0.2, int(lengths.sum())).clip(-1, 1).astype(np.float32),
        "lengths": lengths,
        "label": np.arange(24) % 2,
        "speaker": np.arange(24) // 2 % 4,
        "sample_rate": np.array(8000),
    }
    np.savez(folder / "sounds.npz", **arrays)
    return str(folder / "sounds.npz")


def write_graphs(folder: Path) -> str:
    arrays = {
        "edges": np.array([[0, 1], [1, 2], [2, 0], [3, 4]]),
        "labels": np.array([0, 1, -1, 1, 0, 1]),
        "features": np.arange(12, dtype=np.float32).reshape(6, 2),
        "node_counts": np.array([3, 2, 1]),
        "train": np.array([0, 3]),
        "valid": np.array([1]),
        "test": np.array([4, 5]),
    }
    np.savez(folder / "graphs.npz", **arrays)
    return str(folder / "graphs.npz")


def write_modalities(folder: Path) -> str:
    arrays = {
        "images": np.random.default_rng(SEED).integers(0, 256, (12, 4, 4), dtype=np.uint8),
        "image_index": np.arange(12),
        "texts": np.array(PHRASES),
        "text_index": np.arange(12),
        "labels": np.arange(12) % 2,
        "label_names": np.array(["no", "yes"]),
        "train": np.arange(9),
        "valid": np.arange(9, 12),
    }
    np.savez(folder / "examples.npz", **arrays)
    return str(folder / "examples.npz")


def write_episodes(folder: Path) -> str:
    lengths = np.array([3, 2, 5, 1])
    arrays = {
        "observations": np.random.default_rng(SEED).normal(size=(11, 2)).astype(np.float32),
        "actions": np.arange(11) % 3,
        "rewards": np.ones(11, dtype=np.float32),
        "lengths": lengths,
    }
    np.savez(folder / "episodes.npz", **arrays)
    return str(folder / "episodes.npz")


CHARACTERS = {"tokenizer": "char"}
TWO_SETS = {"valid": 0.2, "tokenizer": "char"}
CASES: dict[str, tuple[str, str, Callable[[Path], Any] | None, dict[str, Any]]] = {
    "packed": ("text", "next-token", write_text, {"length": 32, **CHARACTERS}),
    "one-text": ("text", "next-token", write_text, {"length": 32, "packing": "concat", **CHARACTERS}),
    "lanes": ("text", "next-token", write_text, {"length": 16, "packing": "contiguous", **CHARACTERS}),
    "masked": ("text", "masked", write_text, {"length": 32, **CHARACTERS}),
    "pairs": ("pairs", "pairs", write_pairs, TWO_SETS),
    "labels": ("labels", "labelled", write_labels, TWO_SETS),
    "sentence-pairs": ("sentence-pairs", "labelled", write_two_texts, TWO_SETS),
    "questions": ("questions", "spans", write_questions, TWO_SETS),
    "trees": ("trees", "tagged", write_trees, TWO_SETS),
    "images": ("images", "labelled", write_images, {}),
    "recordings": ("audio", "labelled", write_recordings, {"sample_rate": 8000, "mels": 8}),
    "graphs": ("graphs", "nodes", write_graphs, {}),
    "modalities": ("modalities", "labelled", write_modalities, {"part_dropout": 0.3}),
    "trajectories": ("trajectories", "windows", write_episodes, {"length": 2, "valid": 0.25}),
    "rules": ("synthetic", "next-token", None, {"rule": "copy", "length": 8, "valid": 16}),
}
TOKENS = {"images": 640, "recordings": 60, "trajectories": 8, "graphs": 8, "modalities": 200}


def opened(name: str, folder: Path) -> OpenedData:
    kind, form, write, settings = CASES[name]
    path = {} if write is None else {"path": write(folder)}
    run = RunConfig.model_validate({"recipe": "any", "data": {"kind": kind, **path, **settings}})
    return open_data(run.data, form, batch_tokens=TOKENS.get(name, 128), cache=folder / "data", seed=3)


def prepared(batch: Batch) -> PreparedBatch:
    return PreparedBatch(batch, batch.target_count(), batch.token_count())


def parts_of(batch: Any) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    tree_map(lambda part: parts.append(part) or part, batch)
    return parts


def assert_equal(batch: Any, expected: Any) -> None:
    assert type(batch) is type(expected)
    for part, expected_part in zip(parts_of(batch), parts_of(expected), strict=True):
        torch.testing.assert_close(part, expected_part, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_the_batches_of_two_epochs_are_the_same_ahead_of_their_turn(name: str, tmp_path: Path) -> None:
    data = opened(name, tmp_path)
    expected_held_out = list(data.valid)
    expected = opened(name, tmp_path).train
    assert expected.reads_ahead
    ahead = AheadFeed(data.train, 3, prepared)
    try:
        for _ in range(2 * expected.batches):
            batch = next(expected)
            taken = next(ahead)
            assert_equal(taken.batch, batch)
            assert (taken.targets, taken.tokens) == (batch.target_count(), batch.token_count())
            assert ahead.state_dict() == expected.state_dict()
            # the thread reads meanwhile
            for held_out, expected_batch in zip(data.valid, expected_held_out):
                assert_equal(held_out, expected_batch)
                break
    finally:
        ahead.close()


def test_no_kind_of_data_is_left_out() -> None:
    tested = {kind for kind, *_ in CASES.values()}
    # what a policy does depends on its weights
    assert tested == set(DATA_SECTIONS) - {"environment"}
