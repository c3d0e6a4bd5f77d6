"""The description file of a datastore, and the names of its files."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyformer.data.token_shards import ShardFacts, is_complete
from manyformer.datastore.context_keys import KeyLayer
from manyformer.errors import UserError

FORMAT = 1
FACTS, BUILDING, TUNED = "datastore.json", "building.json", "tuned.json"
KEYS, INDEX, TEXT = "keys", "index.faiss", "text"
"""Keys are one flat file; the text is a shard as in the data of a run: its tokens and the offsets of documents."""

KeyPrecision = Literal["float16", "float32"]
BYTES: dict[KeyPrecision, int] = {"float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class DatastoreFacts:
    """How a datastore was built: equal facts give equal files."""

    model: str
    """The fingerprint of the weights; `recipe` is for reports."""
    recipe: str
    keys: KeyLayer
    width: int
    precision: KeyPrecision
    source: str
    """A description of the text for reports."""
    text: ShardFacts
    vocab: int
    length: int
    """Tokens per row, as in the run's data; `packing` is how rows are cut, `rows` the number per batch."""
    packing: str
    rows: int

    @property
    def entries(self) -> int:
        """The number of entries: every token except the first of a document has a context."""
        return self.text.tokens - self.text.documents

    @property
    def key_bytes(self) -> int:
        return self.entries * self.width * BYTES[self.precision]

    @property
    def bytes(self) -> int:
        """The size of all files in bytes, without an index."""
        text = self.text.tokens * np.dtype(self.text.dtype).itemsize + 8 * (self.text.documents + 1)
        return self.key_bytes + text

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the key file."""
        return np.dtype(self.precision).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        """The facts as a JSON object, for the description file and for scripts."""
        return {**asdict(self), "text": self.text._asdict(), "entries": self.entries}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "DatastoreFacts":
        """The facts from the object that `to_json` returned."""
        values = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**values, "text": ShardFacts(**content["text"])})


def read_facts(folder: Path) -> DatastoreFacts:
    """The facts of a finished datastore. Raises UserError if there is none, or if a file is missing or truncated."""
    file = folder / FACTS
    if not folder.is_dir():
        raise UserError(f"there is no datastore {folder}; `manyformer datastore build RUN --out {folder}` builds one")
    if (folder / BUILDING).exists() and not file.exists():
        raise UserError(f"{folder} is not finished: the same `manyformer datastore build` resumes it")
    if not file.is_file():
        raise UserError(f"{folder} holds no datastore: {FACTS} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = DatastoreFacts.from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: it is not the description of a datastore ({error})") from error
    if content.get("format") != FORMAT:
        raise UserError(f"{folder} was written in format {content.get('format')}, and this version reads {FORMAT}")
    keys = folder / KEYS
    size = keys.stat().st_size if keys.exists() else 0
    if size != facts.key_bytes:
        raise UserError(f"{keys} is damaged: it has {size:,} bytes instead of {facts.key_bytes:,}; build it anew")
    if not is_complete(folder, TEXT, facts.text):
        raise UserError(f"the text of {folder} is missing or truncated; build it anew")
    return facts


def entries_at(offsets: NDArray[np.int64], text_positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entry whose context ends at each of these positions in a text, none of which ends a document."""
    return text_positions - (np.searchsorted(offsets, text_positions, side="right") - 1)
