"""What documented commands read: small files under the names of the pages, and tiny runs that are trained once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from manyformer.cli import run

TREE = """\
1\t{0}\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tsee\t_\tVERB\t_\t_\t0\troot\t_\t_
3\t{1}\t_\tNOUN\t_\t_\t2\tobj\t_\t_
"""
SIZES = ("dim=32", "depth=2", "heads=2", "limits.steps=4", "evaluate.every=4", "save.every=4", "batch.tokens=256")
TEXT = ("data.path=book.txt", "data.length=64", *SIZES)
MEMORY_TEXT = (*TEXT, "data.packing=contiguous")

POLICY_SIZES = (
    *("model.dim=8", "model.depth=1", "data.options={length: 4}", "data.rows=4", "data.steps=5", "data.passes=1"),
    *("data.valid=4", "limits.steps=2", "schedule.warmup=0", "evaluate.every=2"),
)

KINDS: dict[str, tuple[str, ...]] = {
    "text": ("transformer-lm", *TEXT, "max_length=256"),
    "masked": ("bert", *TEXT, "max_length=512"),
    "diffusion": ("mdlm", *TEXT),
    "ahead": ("llama", "model.ahead=sequential", "ahead_tokens=2", *TEXT),
    "memory": ("transformer-xl", *MEMORY_TEXT),
    "pairs": ("transformer", "data.path=[train.en, train.de]", "data.tokenizer=char", *SIZES),
    "labels": ("transformer-classifier", "data.path=reviews.tsv", "data.tokenizer=char", *SIZES),
    "trees": ("structural", "data.path=train.conllu", "data.valid=0.2", *SIZES, "batch.tokens=64"),
    "images": ("vit", "data.path=mnist.npz", "patch=4", *SIZES),
    "spans": ("adaptive-span", *TEXT),
    "steps": ("universal-transformer", "data.path=[train.en, train.de]", "data.tokenizer=char", *SIZES),
    "policy": ("rl/memory-length", *POLICY_SIZES),
    "returns": ("rl/graph-walks", "limits.steps=2", "schedule.warmup=0", "evaluate.every=2", "data.episodes=4"),
}
"""The words after `train` for each kind of run."""

RUNS = {
    **dict.fromkeys(("lm-stdlib", "book", "my-run"), "text"),
    **dict.fromkeys(("one", "two", "other", "translate-multi30k", "translate-normalization"), "pairs"),
    **dict.fromkeys(("masked-stdlib", "bert"), "masked"),
    **dict.fromkeys(("labels-trec", "labels"), "labels"),
    **dict.fromkeys(("rl-memory-length", "memory"), "policy"),
    **{
        "mdlm": "diffusion",
        "llama-ahead": "ahead",
        "lm-memory": "memory",
        "tag-relations": "trees",
        "images-vit": "images",
    },
    **{"adaptive-span": "spans", "universal": "steps", "rl-graph-walks": "returns"},
}
"""The kind of run that each name in a page stands for."""


def write_files(folder: Path) -> None:
    """The files that commands name."""
    nouns = ["men", "dogs", "cats", "girls", "boys"]
    counts = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
    phrases = [f"{count} {noun} are sitting on a bench ." for count in counts for noun in nouns]
    for name in ("train", "val", "test"):
        (folder / f"{name}.en").write_text("".join(f"{phrase}\n" for phrase in phrases))
        (folder / f"{name}.de").write_text("".join(f"{phrase[::-1]}\n" for phrase in phrases))
    for name in ("mine.yaml", "run.yaml"):
        (folder / name).write_text("extends: lm/stdlib\n")
    for name in ("book.txt", "other.txt", "input.txt"):
        (folder / name).write_text("def add(a, b):\n    return a + b  # Beautiful is better than ugly.\n\n" * 100)
    (folder / "reviews.tsv").write_text("".join(f"{phrase}\t{phrase[:2]}\n" for phrase in phrases))
    for name in ("reviews.csv", "other.csv"):
        (folder / name).write_text("comment,topic\n" + "".join(f"{phrase},{phrase[:2]}\n" for phrase in phrases))
    (folder / "new.txt").write_text("two men are sitting on a bench .\n")
    (folder / "questions.txt").write_text("a good book\na bad one\n")
    (folder / "questions.jsonl").write_text(f"{json.dumps({'text': 'a good book'})}\n" * 2)
    trees = "\n".join(TREE.format(subject, thing) for subject in counts for thing in nouns)
    for name in ("train.conllu", "parsed.conllu", "en_ewt-ud-test.conllu"):
        (folder / name).write_text(trees)
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])
    (folder / "photos").mkdir()
    Image.fromarray(images[0]).save(folder / "photos/one.png")


def write_training_files(folder: Path) -> None:
    """The files that documented trainings name, large enough for their batches, in the place of those in `folder`."""
    phrases = (folder / "train.en").read_text().splitlines() * 25
    questions = [{"document": phrase, "question": "how many?", "answer": phrase.split()[0]} for phrase in phrases]
    contents = {
        "book.txt": (folder / "book.txt").read_text() * 4,
        "train.en": "".join(f"{phrase}\n" for phrase in phrases),
        "train.de": "".join(f"{phrase[::-1]}\n" for phrase in phrases),
        "reviews.tsv": "".join(f"{phrase}\t{phrase[:2]}\n" for phrase in phrases),
        "reviews.csv": "comment,topic\n" + "".join(f"{phrase},{phrase[:2]}\n" for phrase in phrases),
        "questions.jsonl": "".join(f"{json.dumps(question)}\n" for question in questions),
    }
    for name, content in contents.items():
        (folder / name).unlink()
        (folder / name).write_text(content)
    labels = np.arange(100) % 2
    images = np.random.default_rng(0).integers(0, 256, (100, 28, 28), dtype=np.uint8)
    (folder / "mnist.npz").unlink()
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])
    (folder / "photos").unlink()
    for number, (image, label) in enumerate(zip(images, labels)):
        place = folder / "photos" / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")


def train_once(folder: Path, kind: str) -> Path:
    """The run of that kind in `folder`, whose files it reads, trained where it is not there yet."""
    out = folder / "runs" / kind
    if not out.exists():
        in_folder(folder, lambda: run(["train", *KINDS[kind], f"out=runs/{kind}", "device=cpu", "--quiet"]))
    return out


def in_folder(folder: Path, work: Callable[[], int]) -> None:
    """Do something in another current folder that has to end well."""
    original = Path.cwd()
    os.chdir(folder)
    try:
        assert work() == 0
    finally:
        os.chdir(original)
