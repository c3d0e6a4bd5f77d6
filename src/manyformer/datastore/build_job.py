"""The specification of a datastore to build: a trained run, a text, and the layer whose inputs are the keys."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.config import TextData
from manyformer.context_windows import ContextWindows
from manyformer.data.cache_folder import load_prepared
from manyformer.data.open_text import make_layout, write_text_shard
from manyformer.data.opened import EvaluationPath
from manyformer.data.text_epochs import NextTokenBatches
from manyformer.data.text_sources import text_sources
from manyformer.data.token_shards import ShardFacts, TokenShard, write_shards
from manyformer.datastore.context_keys import KeyExtraction, KeyLayer, extract_keys, read_batch
from manyformer.datastore.facts import BYTES, TEXT, DatastoreFacts, KeyPrecision
from manyformer.errors import UserError, suggest_names
from manyformer.evaluate.eval_data import TrainedRun, open_run, task_of_run
from manyformer.evaluate.evaluate import check_context
from manyformer.files.json_text import json_text
from manyformer.models import LanguageModel
from manyformer.models.generative_model import as_language_model
from manyformer.models.model import CarriedState
from manyformer.models.weights_fingerprint import weights_fingerprint
from manyformer.system.temporary_folders import temporary_folder
from manyformer.type_aliases import IntArray


@dataclass(frozen=True)
class DatastoreJob:
    """Everything that determines a datastore: model, key layer, precision, text, and how its rows are cut."""

    run: TrainedRun
    data: TextData
    model: LanguageModel
    extraction: KeyExtraction
    key_layer: KeyLayer
    precision: KeyPrecision
    split: str | None
    path: EvaluationPath | None
    weights: str
    windows: ContextWindows | None = None

    @property
    def rows(self) -> int:
        """The number of rows per batch, which is the number of lanes in contiguous packing, as in evaluation."""
        if self.windows is None:
            row_length = self.data.length
        else:
            row_length = self.windows.context
        return max(1, self.run.config.batch.tokens // row_length)

    @property
    def piece_length(self) -> int | None:
        """The most tokens that a model with a memory reads of a window at once; None for rows that are no windows."""
        if self.windows is None:
            return None
        return self.data.length

    @property
    def source(self) -> str:
        """A description of the text for reports."""
        if self.path is None:
            return f"{self.split} of {self.run.folder}"
        if isinstance(self.path, str):
            return self.path
        return " and ".join(self.path)

    def identity(self, scratch_dir: Path) -> dict[str, Any]:
        """The settings that must be equal for a build to be resumed."""
        if self.path is None:
            stamps: Any = self._open_split().facts.sha256
        else:
            stamps = [source.stamp() for source in text_sources(self.path, self.data.column, scratch_dir)]
        settings: dict[str, Any] = {"model": self.weights, "keys": self.key_layer, "precision": self.precision}
        settings |= {"length": self.data.length, "packing": self.data.packing, "rows": self.rows, "text": stamps}
        if self.windows is not None:
            settings |= self.windows._asdict()
        normalized: dict[str, Any] = json.loads(json_text(settings))
        return normalized

    def write_text(self, folder: Path) -> ShardFacts:
        """Write the tokens of the text as a shard into `folder`."""
        if self.path is not None:
            return write_text_shard(self.data, self.run.tokenizers.source, self.path, folder).facts
        shard = self._open_split()
        with write_shards(folder, [TEXT], self.run.tokenizers.source.vocab) as writers:
            for start, stop in zip(shard.offsets[:-1], shard.offsets[1:]):
                writers.shards[TEXT].add(shard.tokens[start:stop].astype(np.int32), starts_document=True)
        # characters and bytes are taken from the run's data, because only tokens are read here
        return writers.facts[TEXT]._replace(characters=shard.facts.characters, bytes=shard.facts.bytes)

    def facts(self, text: ShardFacts) -> DatastoreFacts:
        return DatastoreFacts(
            model=self.weights,
            recipe=self.run.config.recipe,
            keys=self.key_layer,
            width=self.extraction.key_dim,
            precision=self.precision,
            source=self.source,
            text=text,
            vocab=self.run.tokenizers.source.vocab,
            length=self.data.length,
            packing=self.data.packing,
            rows=self.rows,
            context=None if self.windows is None else self.windows.context,
            stride=None if self.windows is None else self.windows.stride,
        )

    def _open_split(self) -> TokenShard:
        prepared = load_prepared(self.run.folder / "data")
        if prepared is None:
            raise UserError(f"the data of {self.run.folder} is missing: give a text with --data")
        if self.split not in prepared.shards:
            suggestion = suggest_names(str(self.split), prepared.shards)
            raise UserError(f"the run in {self.run.folder} has no split '{self.split}'; {suggestion}")
        return prepared.shards[str(self.split)]


def datastore_job(
    run: str | Path,
    *,
    data: EvaluationPath | None = None,
    split: str | None = None,
    keys: KeyLayer = "feed-forward",
    precision: KeyPrecision = "float16",
    windows: ContextWindows | None = None,
    device: str | None = None,
) -> DatastoreJob:
    """The validated job for a run. Raises UserError for a run or settings from which no datastore can be built.

    With `windows` a key is computed from the earlier tokens of a window, else from those of a row as in training.
    """
    trained = open_run(run)
    if data is not None and split is not None:
        raise UserError("give either a split or data, not both")
    if precision not in BYTES:
        raise UserError(f"precision ('{precision}') must be one of {', '.join(BYTES)}")
    if keys not in (names := ("feed-forward", "final")):
        raise UserError(f"keys ('{keys}') must be one of {', '.join(names)}")
    settings = trained.config.data
    if not isinstance(settings, TextData) or task_of_run(trained.config).generates != "continuation":
        raise UserError(f"{run} ({trained.config.recipe}) is not a language model of text, which a datastore needs")
    model = as_language_model(trained.load_model(device), "use a datastore")
    if windows is not None:
        check_context(model, windows, settings.length)
    return DatastoreJob(
        trained,
        settings,
        model,
        extract_keys(model, keys),
        keys,
        precision,
        split="train" if split is None and data is None else split,
        path=data,
        weights=weights_fingerprint(model),
        windows=windows,
    )


class ContextReader:
    """Reads the contexts of a text in batches of rows, carrying the model's memory as in evaluation."""

    def __init__(self, job: DatastoreJob, shard: TokenShard) -> None:
        self.rows = job.rows
        self.key_dim = job.extraction.key_dim
        self.piece_length = job.piece_length
        pad = job.run.tokenizers.target.pad
        layout = make_layout(job.data, shard, job.rows, pad=pad, shifted=True, windows=job.windows)
        self.arrangement = layout.arrange(None)
        self.carried = CarriedState(job.extraction.reader.eval(), rows_continue=self.arrangement.rows_continue)

    def __len__(self) -> int:
        """The number of batches."""
        return -(-self.arrangement.count // self.rows)

    def read(self, index: int) -> tuple[IntArray, NDArray[np.float32]]:
        """The last position in the text (n,) of each context of a batch that a token follows, and its key (n, d)."""
        rows = np.arange(index * self.rows, min((index + 1) * self.rows, self.arrangement.count))
        batch = NextTokenBatches().make_batch(self.arrangement.rows(rows), ())
        with torch.inference_mode():
            hidden = read_batch(self.carried, batch, piece_length=self.piece_length)
            keys = hidden[:, -self.key_dim :].cpu().float().numpy()
        return self.arrangement.token_indices(rows)[(batch.targets != IGNORE_INDEX).numpy()], keys


def plan(job: DatastoreJob) -> DatastoreFacts:
    """The facts of the datastore that `job` would build; the text is read and counted, and no files remain."""
    with temporary_folder() as scratch_dir:
        return job.facts(job.write_text(scratch_dir))


def default_folder(job: DatastoreJob) -> Path:
    """The default folder of a datastore: inside the folder of its run, named after its text."""
    if isinstance(job.path, str) or job.path is None:
        path = job.path
    else:
        path = job.path[0]
    if path is None:
        name = job.split
    else:
        name = Path(path.removeprefix("hf:")).name.split(".")[0] or "text"
    return job.run.folder / "datastores" / str(name)
