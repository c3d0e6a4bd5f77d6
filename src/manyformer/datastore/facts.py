"""What a datastore says of itself, and the files that it is made of."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyformer.data.token_shards import ShardFacts as ShardFacts
from manyformer.data.token_shards import is_complete
from manyformer.datastore.context_keys import KeyLayer
from manyformer.errors import UserError

FORMAT = 1
FACTS, BUILDING, TUNED = "datastore.json", "building.json", "tuned.json"
KEYS, INDEX, TEXT = "keys", "index.faiss", "text"
"""Keys are one flat file, the text a shard as in the data of a run: its tokens and where documents begin."""

KeyPrecision = Literal["float16", "float32"]
BYTES: dict[KeyPrecision, int] = {"float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class DatastoreFacts:
    """How a datastore was made: equal facts make equal files."""

    model: str
    """The fingerprint of the weights, and below it the recipe, for people."""
    recipe: str
    keys: KeyLayer
    width: int
    precision: KeyPrecision
    source: str
    """The text, for people."""
    text: ShardFacts
    vocab: int
    length: int
    """Tokens in a row, as in the run's data; below it how rows are cut and how many are read at once."""
    packing: str
    rows: int

    @property
    def entries(self) -> int:
        """Every token but the one that begins a document follows a context."""
        return self.text.tokens - self.text.documents

    @property
    def key_bytes(self) -> int:
        return self.entries * self.width * BYTES[self.precision]

    @property
    def bytes(self) -> int:
        """What all files take together, without an index."""
        text = self.text.tokens * np.dtype(self.text.dtype).itemsize + 8 * (self.text.documents + 1)
        return self.key_bytes + text

    @property
    def kind(self) -> np.dtype[Any]:
        """The type of a number of a key in its file."""
        return np.dtype(self.precision).newbyteorder("<")

    def json(self) -> dict[str, Any]:
        """For a file, and for scripts."""
        return {**asdict(self), "text": self.text._asdict(), "entries": self.entries}

    @classmethod
    def read(cls, found: dict[str, Any]) -> "DatastoreFacts":
        """What `json` gave."""
        words = {field.name: found[field.name] for field in fields(cls)}
        return cls(**{**words, "text": ShardFacts(**found["text"])})


def read_facts(folder: Path) -> DatastoreFacts:
    """The facts of a finished datastore. Raises UserError where there is none, or where a file is missing or cut."""
    file = folder / FACTS
    if not folder.is_dir():
        raise UserError(f"there is no datastore {folder}; `manyformer datastore build RUN --out {folder}` makes one")
    if (folder / BUILDING).exists() and not file.exists():
        raise UserError(f"{folder} is not finished: the same `manyformer datastore build` goes on with it")
    if not file.is_file():
        raise UserError(f"{folder} holds no datastore: {FACTS} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = DatastoreFacts.read(content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: it is not the description of a datastore ({error})") from error
    if content.get("format") != FORMAT:
        raise UserError(f"{folder} was written in format {content.get('format')}, and this version reads {FORMAT}")
    keys = folder / KEYS
    size = keys.stat().st_size if keys.exists() else 0
    if size != facts.key_bytes:
        raise UserError(f"{keys} is damaged: it has {size:,} bytes instead of {facts.key_bytes:,}; build it anew")
    if not is_complete(folder, TEXT, facts.text):
        raise UserError(f"the text of {folder} is missing or cut; build it anew")
    return facts


def entries_at(offsets: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entry whose context ends at each of these places of a text, none of them a document's last."""
    return places - (np.searchsorted(offsets, places, side="right") - 1)
