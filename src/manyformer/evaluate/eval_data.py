"""What a model is scored on: a split that its run held out, or any file, tokenized as the run was."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.config import ImagesData, LabelsData, PairsData, RunConfig, SyntheticData, TextData, TreesData
from manyformer.data import HeldOutBatches, HeldOutExample, TextUnits, Tokenizer, TokenizerPair, open_data
from manyformer.data.cache_folder import load_prepared
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.neighbour_tables import lookups_of
from manyformer.data.open_images import examples_of, held_out, other_images
from manyformer.data.open_text import layout_of
from manyformer.data.open_trees import tagged_of, tagged_rows
from manyformer.data.opened import read_examples
from manyformer.data.padded_examples import PairDataset, TaggedDataset
from manyformer.data.pair_tables import table
from manyformer.data.table_files import TableRow
from manyformer.data.text_epochs import MaskedBatches, NextTokenBatches, TextPlan
from manyformer.data.text_sources import text_sources
from manyformer.data.token_shards import TokenShard, open_shard, writing_shards
from manyformer.data.treebank import treebank
from manyformer.errors import UserError, nearest

EvaluationPath = str | Sequence[str]


class EvaluationData(NamedTuple):
    """What to score: its name, batches of it (none of labelled texts), pairs or labelled texts as they were read."""

    name: str
    held: HeldOutBatches | None
    examples: tuple[HeldOutExample, ...] = ()


def split_of(run: RunConfig, task: str, folder: Path, split: str | None) -> EvaluationData:
    """A split that the run held out: the one asked for, else test where there is one, else valid.

    It comes from what training kept in the run's folder; only where that is gone the data is read again.
    """
    if split not in (None, "valid", "test"):
        raise UserError(f"there is no split '{split}' to score; {nearest(str(split), ('valid', 'test'))}")
    cache = folder / "data"
    if isinstance(run.data, SyntheticData):
        made = open_data(run.data, task, batch_tokens=run.batch.tokens, cache=cache, seed=run.seed)
        return EvaluationData(split or "test", made.valid if split == "valid" else made.test)
    if load_prepared(cache) is None:
        open_data(run.data, task, batch_tokens=run.batch.tokens, cache=cache, seed=run.seed)
    ready = load_prepared(cache)
    assert ready is not None
    there = {name.partition(".")[0] for name in ready.shards}
    if split == "test" and "test" not in there:
        raise UserError(f"the run in {folder} has no test data (data.test); score the split valid, or another file")
    name = split or ("test" if "test" in there else "valid")
    examples = () if isinstance(run.data, TextData | TreesData | ImagesData) else tuple(read_examples(cache, name))
    match run.data:
        case TextData():
            return EvaluationData(name, _text(run, run.data, task, ready.tokenizers, ready.shards[name]))
        case PairsData():
            held = _pairs(run, ready.shards[f"{name}.source"], ready.shards[f"{name}.target"])
            return EvaluationData(name, held, examples)
        case LabelsData():
            return EvaluationData(name, None, examples)
        case TreesData():
            return EvaluationData(name, _trees(run, tagged_of(ready.shards, f"{name}.")))
        case ImagesData():
            return EvaluationData(name, held_out(examples_of(ready, f"{name}.", task), task, run.batch.tokens))


def file_of(run: RunConfig, task: str, tokenizers: TokenizerPair, path: EvaluationPath, room: Path) -> EvaluationData:
    """Data of the run's kind from elsewhere; `room` is a folder for shards. Raises UserError for bad data."""
    name = path if isinstance(path, str) else " and ".join(path)
    match run.data:
        case TextData():
            shard = text_shard(run.data, tokenizers.source, path, room)
            return EvaluationData(name, _text(run, run.data, task, tokenizers, shard))
        case PairsData():
            columns = run.data.source, run.data.target
            examples = _examples(table(path, columns, ("source", "target"), room).rows(), path)
            read, write = tokenizers.source, tokenizers.target
            sources = [np.append(read.encode_array(one.source), read.eos) for one in examples]
            targets = [np.concatenate([[write.bos], write.encode_array(one.target), [write.eos]]) for one in examples]
            source = _shard(room, "source", sources, [one.source for one in examples], read.vocab)
            target = _shard(room, "target", targets, [one.target for one in examples], write.vocab)
            return EvaluationData(name, _pairs(run, source, target), examples)
        case LabelsData():
            rows = table(path, (run.data.text, run.data.label), ("text", "label"), room).rows()
            return EvaluationData(name, None, _examples(rows, path))
        case SyntheticData():
            raise UserError(f"{name}: this run learned from a rule, not from files; score its split valid or test")
        case TreesData():
            return EvaluationData(name, _trees(run, _tagged(run.data, tokenizers, path, room)))
        case ImagesData():
            others = other_images(run.data, tokenizers, path, room, task)
            return EvaluationData(name, held_out(others, task, run.batch.tokens))


def _text(run: RunConfig, data: TextData, task: str, tokenizers: TokenizerPair, shard: TokenShard) -> HeldOutBatches:
    masked = task == "masked"
    rows = max(1, run.batch.tokens // data.length)
    layout = layout_of(data, shard, rows, shifted=not masked)
    finish = MaskedBatches(data.masking, tokenizers.source.vocab) if masked else NextTokenBatches()
    plan = TextPlan(layout, rows, finish, shard.facts.sha256, None if masked else lookups_of(data.neighbours, shard))
    return HeldOutBatches(plan.fixed(), _units(shard))


def _pairs(run: RunConfig, source: TokenShard, target: TokenShard) -> HeldOutBatches:
    pairs = PairDataset(source, target)
    plan = LengthBuckets(pairs, np.arange(len(pairs.lengths)), run.batch.tokens)
    return HeldOutBatches(plan.fixed(), _units(target))


def _trees(run: RunConfig, tagged: TaggedDataset) -> HeldOutBatches:
    return HeldOutBatches(LengthBuckets(tagged, np.arange(len(tagged.lengths)), run.batch.tokens).fixed(), None)


def _tagged(data: TreesData, tokenizers: TokenizerPair, path: EvaluationPath, room: Path) -> TaggedDataset:
    """The sentences of a treebank, with its labels numbered as in training."""
    each = [path] if isinstance(path, str) else path
    rows = [row for one in each for row in treebank(one, data.label, room).rows()]
    if not rows:
        raise UserError(f"{path}: there is nothing in it")
    return tagged_rows(rows, tokenizers, room)


def _units(shard: TokenShard) -> TextUnits:
    """Every token but the one that begins a document is a target."""
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def text_shard(data: TextData, words: Tokenizer, path: EvaluationPath, room: Path) -> TokenShard:
    """The text at `path`, tokenized as the run's was, as the shard "text" in the folder `room`."""
    with writing_shards(room, ["text"], words.vocab) as writers:
        for part in (part for source in text_sources(path, data.column, room) for part in source.parts()):
            bos, eos = [words.bos] * part.begins, [words.eos] * part.ends
            ids = np.concatenate([bos, words.encode_array(part.text), eos])
            writers.shards["text"].add(ids, begins=part.begins, text=part.text)
    facts = writers.facts["text"]
    if not facts.characters:
        raise UserError(f"{path}: there is no text in it")
    return open_shard(room, "text", facts)


def _shard(room: Path, name: str, rows: Sequence[NDArray[np.int32]], texts: Sequence[str], vocab: int) -> TokenShard:
    with writing_shards(room, [name], vocab) as writers:
        for ids, text in zip(rows, texts, strict=True):
            writers.shards[name].add(ids, begins=True, text=text)
    return open_shard(room, name, writers.facts[name])


def _examples(rows: Iterable[TableRow], path: EvaluationPath) -> tuple[HeldOutExample, ...]:
    found = tuple(HeldOutExample(row.cells[0], row.cells[1], row.where) for row in rows)
    if not found:
        raise UserError(f"{path}: there is nothing in it")
    return found
