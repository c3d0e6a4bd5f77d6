"""Small datastores: written by hand around any keys, or built of a run that is hardly trained."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.base.files.verified_folder import write_manifest
from manyformer.cli import run
from manyformer.data.storage.token_shards import write_shards
from manyformer.inference.datastore import Datastore, DatastoreFacts
from manyformer.inference.datastore.context_keys import KeyLayer
from manyformer.models import Model
from manyformer.models.model import weights_fingerprint

WORDS = ["the", "cat", "dog", "sat", "lay", "ran", "on", "by", "up", "mat", "door", "tree", "and", "one", "day", "saw"]
TEXT = " ".join(random.Random(0).choices(WORDS, k=400))
OTHER = "a bird in the hand is worth two in the bush, said the fox to the crow; and the crow said nothing at all\n" * 8


def written(
    folder: Path,
    keys: NDArray[np.float32],
    texts: Sequence[Sequence[int]],
    *,
    model: Model | None = None,
    name: KeyLayer = "final",
) -> Datastore:
    """A datastore of documents of token numbers, with one key for each token but the last of each."""
    with write_shards(folder, ["text"], 1000) as writers:
        for text in texts:
            writers.shards["text"].add(list(text), starts_document=True)
    facts = DatastoreFacts(
        model="0" * 64 if model is None else weights_fingerprint(model),
        recipe="by hand",
        keys=name,
        width=keys.shape[1],
        precision="float32",
        source="a test",
        text=writers.facts["text"],
        vocab=1000 if model is None else model.head.classes,
        length=64,
        packing="documents",
        rows=1,
    )
    (folder / "keys").write_bytes(keys.astype("<f4").tobytes())
    facts.write(folder / "datastore.json")
    write_manifest(folder)
    return Datastore(folder)


def trained(folder: Path, *words: str) -> Path:
    """A language model of characters after two steps."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "other.txt").write_text(OTHER)
    tiny = ("dim=16", "depth=2", "heads=2", "limits.steps=2", "evaluate.every=null", "save.every=2", "data.length=32")
    data = ("data.path=text.txt", "data.tokenizer=char", "data.valid=0.1", "batch.tokens=128")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["train", *words, *data, *tiny, "out=run", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder / "run"
