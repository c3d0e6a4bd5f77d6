"""What a datastore is to be made of: a trained run, a text, and which states of the model are keys."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyformer.api import load
from manyformer.config import RUN_FILE, RunConfig, TextData
from manyformer.data import TokenizerPair, load_tokenizers
from manyformer.data.cache_folder import load_prepared
from manyformer.data.text_sources import text_sources
from manyformer.data.token_shards import ShardFacts as ShardFacts
from manyformer.data.token_shards import TokenShard, writing_shards
from manyformer.datastore.context_keys import KeyExtraction, KeyLayer, fingerprint, keyed
from manyformer.datastore.facts import BYTES, FORMAT, TEXT, DatastoreFacts, KeyPrecision
from manyformer.errors import UserError, nearest
from manyformer.evaluate.eval_data import EvaluationPath, text_shard
from manyformer.models import LanguageModel
from manyformer.train.run_folder import as_run


@dataclass(frozen=True)
class DatastoreJob:
    """Everything that a datastore is made of."""

    model: LanguageModel
    keyed: KeyExtraction
    keys: KeyLayer
    precision: KeyPrecision
    run: RunConfig
    data: TextData
    folder: Path
    tokenizers: TokenizerPair
    split: str | None
    path: EvaluationPath | None
    weights: str

    @property
    def rows(self) -> int:
        """Rows that are read at once: in lanes they are what a lane is, as in evaluation."""
        return max(1, self.run.batch.tokens // self.data.length)

    @property
    def source(self) -> str:
        """The text, for people."""
        if self.path is None:
            return f"{self.split} of {self.folder}"
        return self.path if isinstance(self.path, str) else " and ".join(self.path)

    def asked(self, room: Path) -> dict[str, Any]:
        """What must be equal for a build to go on."""
        if self.path is None:
            stamps: Any = self._split().facts.sha256
        else:
            stamps = [source.stamp() for source in text_sources(self.path, self.data.column, room)]
        asked = {"format": FORMAT, "model": self.weights, "keys": self.keys, "precision": self.precision}
        asked |= {"length": self.data.length, "packing": self.data.packing, "rows": self.rows, "text": stamps}
        found: dict[str, Any] = json.loads(json.dumps(asked))
        return found

    def text(self, room: Path) -> ShardFacts:
        """Write the text's tokens into the folder `room`."""
        if self.path is not None:
            return text_shard(self.data, self.tokenizers.source, self.path, room).facts
        shard = self._split()
        with writing_shards(room, [TEXT], self.tokenizers.source.vocab) as writers:
            for begin, end in zip(shard.offsets[:-1], shard.offsets[1:]):
                writers.shards[TEXT].add(shard.tokens[begin:end].astype(np.int32), begins=True)
        # what the tokens stand for is not read again
        return writers.facts[TEXT]._replace(characters=shard.facts.characters, bytes=shard.facts.bytes)

    def facts(self, text: ShardFacts) -> DatastoreFacts:
        return DatastoreFacts(
            model=self.weights,
            recipe=self.run.recipe,
            keys=self.keys,
            width=self.keyed.width,
            precision=self.precision,
            source=self.source,
            text=text,
            vocab=self.tokenizers.source.vocab,
            length=self.data.length,
            packing=self.data.packing,
            rows=self.rows,
        )

    def _split(self) -> TokenShard:
        ready = load_prepared(self.folder / "data")
        if ready is None:
            raise UserError(f"the data of {self.folder} is gone: give a text with --data")
        if self.split not in ready.shards:
            raise UserError(
                f"the run in {self.folder} has no split '{self.split}'; {nearest(str(self.split), ready.shards)}"
            )
        return ready.shards[str(self.split)]


def datastore_job(
    run: str | Path,
    *,
    data: EvaluationPath | None = None,
    split: str | None = None,
    keys: KeyLayer = "feed-forward",
    precision: KeyPrecision = "float16",
    device: str | None = None,
) -> DatastoreJob:
    """What is to be done, checked. Raises UserError for a run or settings from which no datastore can be made."""
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which says how to read text")
    if data is not None and split is not None:
        raise UserError("give either a split or data, not both")
    if precision not in BYTES:
        raise UserError(f"precision ('{precision}') must be one of {', '.join(BYTES)}")
    if keys not in (names := ("feed-forward", "final")):
        raise UserError(f"keys ('{keys}') must be one of {', '.join(names)}")
    record = as_run(folder)
    model = load(folder).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(record.data, TextData) or not isinstance(model, LanguageModel):
        raise UserError(f"{run} ({record.recipe}) is no language model of text, and a datastore continues texts")
    own, chosen = keyed(model, keys), split or ("train" if data is None else None)
    tokenizers = load_tokenizers(folder / "model")
    return DatastoreJob(
        model, own, keys, precision, record, record.data, folder, tokenizers, chosen, data, fingerprint(model)
    )


def plan(work: DatastoreJob) -> DatastoreFacts:
    """What a datastore will be: its text is read and counted for it, and nothing is left on the disk."""
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room:
        return work.facts(work.text(Path(room)))


def default_folder(work: DatastoreJob) -> Path:
    """Where a datastore goes unless told: into the folder of its run, by the name of its text."""
    path = work.path if isinstance(work.path, str) or work.path is None else work.path[0]
    name = work.split if path is None else Path(path.removeprefix("hf:")).name.split(".")[0] or "text"
    return work.folder / "datastores" / str(name)
