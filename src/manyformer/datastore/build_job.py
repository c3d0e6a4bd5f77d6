"""The specification of a datastore to build: a trained run, a text, and the layer whose inputs are the keys."""

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
from manyformer.data.open_text import write_text_shard
from manyformer.data.opened import EvaluationPath
from manyformer.data.text_sources import text_sources
from manyformer.data.token_shards import ShardFacts as ShardFacts
from manyformer.data.token_shards import TokenShard, write_shards
from manyformer.datastore.context_keys import KeyExtraction, KeyLayer, extract_keys, fingerprint
from manyformer.datastore.facts import BYTES, FORMAT, TEXT, DatastoreFacts, KeyPrecision
from manyformer.errors import UserError, suggest_names
from manyformer.models import LanguageModel
from manyformer.train.run_folder import as_run


@dataclass(frozen=True)
class DatastoreJob:
    """Everything that determines a datastore: model, key layer, precision, text, and how its rows are cut."""

    model: LanguageModel
    extraction: KeyExtraction
    key_layer: KeyLayer
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
        """The number of rows per batch, which is the number of lanes in contiguous packing, as in evaluation."""
        return max(1, self.run.batch.tokens // self.data.length)

    @property
    def source(self) -> str:
        """A description of the text for reports."""
        if self.path is None:
            return f"{self.split} of {self.folder}"
        return self.path if isinstance(self.path, str) else " and ".join(self.path)

    def identity(self, scratch_dir: Path) -> dict[str, Any]:
        """The settings that must be equal for a build to be resumed."""
        if self.path is None:
            stamps: Any = self._open_split().facts.sha256
        else:
            stamps = [source.stamp() for source in text_sources(self.path, self.data.column, scratch_dir)]
        settings = {"format": FORMAT, "model": self.weights, "keys": self.key_layer, "precision": self.precision}
        settings |= {"length": self.data.length, "packing": self.data.packing, "rows": self.rows, "text": stamps}
        normalized: dict[str, Any] = json.loads(json.dumps(settings))
        return normalized

    def write_text(self, folder: Path) -> ShardFacts:
        """Write the tokens of the text as a shard into `folder`."""
        if self.path is not None:
            return write_text_shard(self.data, self.tokenizers.source, self.path, folder).facts
        shard = self._open_split()
        with write_shards(folder, [TEXT], self.tokenizers.source.vocab) as writers:
            for start, stop in zip(shard.offsets[:-1], shard.offsets[1:]):
                writers.shards[TEXT].add(shard.tokens[start:stop].astype(np.int32), starts_document=True)
        # characters and bytes are taken from the run's data, because only tokens are read here
        return writers.facts[TEXT]._replace(characters=shard.facts.characters, bytes=shard.facts.bytes)

    def facts(self, text: ShardFacts) -> DatastoreFacts:
        return DatastoreFacts(
            model=self.weights,
            recipe=self.run.recipe,
            keys=self.key_layer,
            width=self.extraction.key_dim,
            precision=self.precision,
            source=self.source,
            text=text,
            vocab=self.tokenizers.source.vocab,
            length=self.data.length,
            packing=self.data.packing,
            rows=self.rows,
        )

    def _open_split(self) -> TokenShard:
        prepared = load_prepared(self.folder / "data")
        if prepared is None:
            raise UserError(f"the data of {self.folder} is missing: give a text with --data")
        if self.split not in prepared.shards:
            suggestion = suggest_names(str(self.split), prepared.shards)
            raise UserError(f"the run in {self.folder} has no split '{self.split}'; {suggestion}")
        return prepared.shards[str(self.split)]


def datastore_job(
    run: str | Path,
    *,
    data: EvaluationPath | None = None,
    split: str | None = None,
    keys: KeyLayer = "feed-forward",
    precision: KeyPrecision = "float16",
    device: str | None = None,
) -> DatastoreJob:
    """The validated job for a run. Raises UserError for a run or settings from which no datastore can be built."""
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is not the folder of a run: {RUN_FILE}, which describes the data, is missing")
    if data is not None and split is not None:
        raise UserError("give either a split or data, not both")
    if precision not in BYTES:
        raise UserError(f"precision ('{precision}') must be one of {', '.join(BYTES)}")
    if keys not in (names := ("feed-forward", "final")):
        raise UserError(f"keys ('{keys}') must be one of {', '.join(names)}")
    record = as_run(folder)
    model = load(folder).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(record.data, TextData) or not isinstance(model, LanguageModel):
        raise UserError(f"{run} ({record.recipe}) is not a language model of text, which a datastore needs")
    extraction, chosen_split = extract_keys(model, keys), split or ("train" if data is None else None)
    tokenizers = load_tokenizers(folder / "model")
    return DatastoreJob(
        model,
        extraction,
        keys,
        precision,
        record,
        record.data,
        folder,
        tokenizers,
        chosen_split,
        data,
        fingerprint(model),
    )


def plan(job: DatastoreJob) -> DatastoreFacts:
    """The facts of the datastore that `job` would build; the text is read and counted, and no files remain."""
    with tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir:
        return job.facts(job.write_text(Path(scratch_dir)))


def default_folder(job: DatastoreJob) -> Path:
    """The default folder of a datastore: inside the folder of its run, named after its text."""
    path = job.path if isinstance(job.path, str) or job.path is None else job.path[0]
    name = job.split if path is None else Path(path.removeprefix("hf:")).name.split(".")[0] or "text"
    return job.folder / "datastores" / str(name)
