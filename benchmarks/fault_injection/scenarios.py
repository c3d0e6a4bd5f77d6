"""Tiny runs, datastores, comparisons and models, a second each, that faults are done to."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fault_injection.forked_commands import LOAD

Command = tuple[str, ...]

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
TRAIN = ("limits.steps=12", "evaluate.every=5", "evaluate.batches=2", "save.every=3", "save.average_last=2")
SMALL = ("dim=16", "depth=2", "heads=2", "batch.tokens=128", "log.every=2", "out=run", *TRAIN)
MORE = ("limits.steps=18",)
TEXT = ("data.path=text.txt", "data.tokenizer=char", "data.length=16")


def write_text(folder: Path) -> None:
    """Thirty documents of random words."""
    words = random.Random(0).choices(WORDS, k=3000)
    paragraphs = [" ".join(words[start : start + 100]) for start in range(0, len(words), 100)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))


def write_pairs(folder: Path) -> None:
    """Sentences and their words in reverse."""
    chance = random.Random(0)
    sentences = [chance.choices(WORDS, k=chance.randint(2, 6)) for _ in range(300)]
    lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in sentences]
    (folder / "pairs.tsv").write_text("".join(lines))


def write_labels(folder: Path) -> None:
    """Sentences and whether they ask."""
    chance = random.Random(0)
    sentences = [chance.choices(WORDS, k=chance.randint(2, 6)) for _ in range(300)]
    lines = [f"{' '.join(words)}\t{'asks' if 'question' in words else 'tells'}\n" for words in sentences]
    (folder / "labels.tsv").write_text("".join(lines))


def write_images(folder: Path) -> None:
    """Noisy images of four by four pixels whose brightness is their class."""
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 3, 200)
    images = (labels[:, None, None] * 60 + chance.integers(0, 60, (200, 8, 8))).astype(np.uint8)
    np.savez(folder / "images.npz", x_train=images, y_train=labels.astype(np.uint8))


def write_comparison(folder: Path) -> None:
    """Two language models of the same text."""
    write_text(folder)
    (folder / "two.yaml").write_text(
        "title: Two widths\n"
        "score: [loss]\n"
        "run:\n"
        "  recipe: transformer-lm\n"
        "  model: {dim: 16, depth: 1, heads: 2, dropout: 0.1}\n"
        "  data: {path: text.txt, tokenizer: char, length: 16}\n"
        "  batch: {tokens: 128}\n"
        "  limits: {steps: 6}\n"
        "  save: {every: 3}\n"
        "  evaluate: {every: null, batches: 2}\n"
        "cases:\n"
        "  narrow: {}\n"
        "  wide: {model: {dim: 32}}\n"
        "claims:\n"
        "  - wide < narrow + 1\n"
    )


@dataclass(frozen=True)
class Scenario:
    """A command that takes a second: what it needs, what it writes, and what is done with that."""

    name: str
    write_inputs: Callable[[Path], None]
    command: Command
    """What is killed or meets a full disk; given again, it goes on."""
    written: str
    """The folder that the command writes."""
    uses: tuple[Command, ...] = ()
    """What is done with the folder afterwards, from the least that it changes to the most."""
    preparation: tuple[Command, ...] = ()
    """The commands before it."""


def training(name: str, recipe: str, write_inputs: Callable[[Path], None], *settings: str, use: Command) -> Scenario:
    """The training of a recipe, and all that can be done with its run."""
    command = ("train", recipe, *SMALL, *settings)
    uses = (("evaluate", "run", "--json"), use, (LOAD, "run"), (*command, *MORE))
    return Scenario(name, write_inputs, command, "run", uses)


GENERATE = ("generate", "run", "to be ", "--seed", "1", "--max-new", "8", "--json")
LANGUAGE = training("language", "transformer-lm", write_text, *TEXT, "dropout=0.2", use=GENERATE)
MEMORY = training(
    "memory", "transformer-xl", write_text, *TEXT, "data.packing=contiguous", "memory_length=16", use=GENERATE
)
HASHES = training(
    "hashes",
    "reformer",
    write_text,
    *TEXT,
    "data.length=32",
    "dropout=0.1",
    "num_buckets=8",
    "chunk_length=8",
    use=GENERATE,
)
TRANSLATION = training(
    "translation",
    "transformer",
    write_pairs,
    "data.path=pairs.tsv",
    "data.tokenizer=bpe",
    "data.vocab=280",
    use=("translate", "run", "to be", "--json"),
)
LABELS = training(
    "labels",
    "transformer-classifier",
    write_labels,
    "data.path=labels.tsv",
    "data.tokenizer=char",
    use=("predict", "run", "labels.tsv", "--json"),
)
IMAGES = training("images", "vit", write_images, "data.path=images.npz", "patch=4", use=("evaluate", "run"))
PROCESSES = training("processes", "transformer-lm", write_text, *TEXT, "dropout=0.2", "devices=2", use=GENERATE)

DATASTORE = Scenario(
    "datastore",
    write_text,
    ("datastore", "build", "run", "--out", "store"),
    "store",
    (
        ("datastore", "evaluate", "run", "store", "--neighbours", "8", "--json"),
        ("datastore", "look", "run", "store", "to be", "--json"),
        (*GENERATE, "--datastore", "store"),
        ("datastore", "build", "run", "--out", "store"),
    ),
    preparation=(LANGUAGE.command,),
)
COMPARISON = Scenario(
    "comparison",
    write_comparison,
    ("compare", "two.yaml", "--out", "comparison", "--json"),
    "comparison",
    (("compare", "two.yaml", "--out", "comparison", "--seeds", "2", "--json"),),
)
EXPORT = Scenario(
    "export",
    write_text,
    ("convert", "run", "--to", "collaborative", "shared_dim=8", "--out", "exported"),
    "exported",
    ((LOAD, "exported"), ("generate", "exported", "to be ", "--seed", "1", "--max-new", "8", "--json")),
    preparation=(LANGUAGE.command,),
)
