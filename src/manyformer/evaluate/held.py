"""What a model is scored on: a split that its run held out, or any file, tokenized as the run was."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.config import LabelsData, PairsData, Run, TextData
from manyformer.data import Example, Held, Tokenizers, Units, open_data
from manyformer.data.buckets import Buckets
from manyformer.data.examples import Pairs
from manyformer.data.records import Row
from manyformer.data.rows import Documents, Windows
from manyformer.data.shards import Shard, open_shard, writing_shards
from manyformer.data.sources import text_sources
from manyformer.data.tables import table
from manyformer.data.text_plan import Masked, NextToken, TextPlan
from manyformer.errors import UserError, nearest

Path_ = str | Sequence[str]


class Material(NamedTuple):
    """What to score: its name, batches of it (none of labelled texts), pairs or labelled texts as they were read."""

    name: str
    held: Held | None
    examples: tuple[Example, ...] = ()


def split_of(run: Run, task: str, folder: Path, split: str | None) -> Material:
    """A split of the run's own data: the one asked for, else test where there is one, else valid."""
    data = open_data(run.data, task, batch_tokens=run.batch.tokens, cache=folder / "data", seed=run.seed)
    if split not in (None, "valid", "test"):
        raise UserError(f"there is no split '{split}' to score; {nearest(str(split), ('valid', 'test'))}")
    if split == "test" and data.test is None:
        raise UserError(f"the run in {folder} has no test data (data.test); score the split valid, or another file")
    name = split or ("valid" if data.test is None else "test")
    held = data.valid if data.test is None or name == "valid" else data.test
    return Material(name, held, () if isinstance(run.data, TextData) else tuple(data.examples(name)))


def file_of(run: Run, task: str, tokenizers: Tokenizers, path: Path_, room: Path) -> Material:
    """Text, pairs or labelled texts from elsewhere; `room` is a folder for shards. Raises UserError for bad data."""
    name = path if isinstance(path, str) else " and ".join(path)
    match run.data:
        case TextData():
            return Material(name, _text(run, run.data, task, tokenizers, path, room))
        case PairsData():
            return Material(name, *_pairs(run, run.data, tokenizers, path, room))
        case LabelsData():
            rows = table(path, (run.data.text, run.data.label), ("text", "label"), room).rows()
            return Material(name, None, _examples(rows, path))


def _text(run: Run, data: TextData, task: str, tokenizers: Tokenizers, path: Path_, room: Path) -> Held:
    words = tokenizers.source
    with writing_shards(room, ["text"], words.vocab) as writers:
        for part in (part for source in text_sources(path, data.column, room) for part in source.parts()):
            bos, eos = [words.bos] * part.begins, [words.eos] * part.ends
            ids = np.concatenate([bos, words.encode_array(part.text), eos])
            writers.shards["text"].add(ids, begins=part.begins, text=part.text)
    facts = writers.facts["text"]
    if not facts.characters:
        raise UserError(f"{path}: there is no text in it")
    shard, masked = open_shard(room, "text", facts), task == "masked"
    layout = (Windows if data.packing == "stream" else Documents)(shard, data.length, shifted=not masked)
    finish = Masked(data.masking, words.vocab) if masked else NextToken()
    plan = TextPlan(layout, max(1, run.batch.tokens // data.length), finish, facts.sha256)
    return Held(plan.fixed(), Units(facts.tokens - facts.documents, facts.characters, facts.bytes))


def _pairs(
    run: Run, data: PairsData, tokenizers: Tokenizers, path: Path_, room: Path
) -> tuple[Held, tuple[Example, ...]]:
    examples = _examples(table(path, (data.source, data.target), ("source", "target"), room).rows(), path)
    read, write = tokenizers.source, tokenizers.target
    sources = [np.append(read.encode_array(one.source), read.eos) for one in examples]
    targets = [np.concatenate([[write.bos], write.encode_array(one.target), [write.eos]]) for one in examples]
    target = _shard(room, "target", targets, [one.target for one in examples], write.vocab)
    pairs = Pairs(_shard(room, "source", sources, [one.source for one in examples], read.vocab), target)
    plan = Buckets(pairs, np.arange(len(examples)), run.batch.tokens)
    facts = target.facts
    return Held(plan.fixed(), Units(facts.tokens - facts.documents, facts.characters, facts.bytes)), examples


def _shard(room: Path, name: str, rows: Sequence[NDArray[np.int32]], texts: Sequence[str], vocab: int) -> Shard:
    with writing_shards(room, [name], vocab) as writers:
        for ids, text in zip(rows, texts, strict=True):
            writers.shards[name].add(ids, begins=True, text=text)
    return open_shard(room, name, writers.facts[name])


def _examples(rows: Iterable[Row], path: Path_) -> tuple[Example, ...]:
    found = tuple(Example(row.cells[0], row.cells[1], row.where) for row in rows)
    if not found:
        raise UserError(f"{path}: there is nothing in it")
    return found
