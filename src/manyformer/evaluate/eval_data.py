"""Evaluation data: a split that the run held out, or any file, tokenized as the training data."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.config import ImagesData, LabelsData, PairsData, RunConfig, SyntheticData, TextData, TreesData
from manyformer.data import HeldOutBatches, HeldOutExample, TextUnits, Tokenizer, TokenizerPair, open_data
from manyformer.data.cache_folder import load_prepared
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.neighbour_tables import open_neighbour_table
from manyformer.data.open_images import held_out_batches, image_dataset, image_dataset_of_files
from manyformer.data.open_text import make_layout
from manyformer.data.open_trees import tagged_dataset, tagged_dataset_of_rows
from manyformer.data.opened import read_examples
from manyformer.data.padded_examples import PairDataset, TaggedDataset
from manyformer.data.pair_tables import open_table
from manyformer.data.table_files import TableRow
from manyformer.data.text_epochs import MaskedBatches, NextTokenBatches, TextPlan
from manyformer.data.text_sources import text_sources
from manyformer.data.token_shards import TokenShard, open_shard, write_shards
from manyformer.data.treebank import open_treebank
from manyformer.errors import UserError, suggest_names

EvaluationPath = str | Sequence[str]


class EvaluationData(NamedTuple):
    """The data to score: its name, its batches (None for labelled texts), and pairs or labelled texts as strings."""

    name: str
    batches: HeldOutBatches | None
    examples: tuple[HeldOutExample, ...] = ()


def load_split(run: RunConfig, task: str, folder: Path, split: str | None) -> EvaluationData:
    """Load a held-out split of the run: `split`, by default test if the run has one, else valid.

    The data comes from the prepared shards in the run's folder; if they are missing, the data is prepared again.
    """
    if split not in (None, "valid", "test"):
        raise UserError(f"there is no split '{split}' to score; {suggest_names(str(split), ('valid', 'test'))}")
    cache = folder / "data"
    if isinstance(run.data, SyntheticData):
        opened = open_data(run.data, task, batch_tokens=run.batch.tokens, cache=cache, seed=run.seed)
        return EvaluationData(split or "test", opened.valid if split == "valid" else opened.test)
    if load_prepared(cache) is None:
        open_data(run.data, task, batch_tokens=run.batch.tokens, cache=cache, seed=run.seed)
    prepared = load_prepared(cache)
    assert prepared is not None
    split_names = {name.partition(".")[0] for name in prepared.shards}
    if split == "test" and "test" not in split_names:
        raise UserError(f"the run in {folder} has no test data (data.test); score the split valid, or another file")
    name = split or ("test" if "test" in split_names else "valid")
    examples = () if isinstance(run.data, TextData | TreesData | ImagesData) else tuple(read_examples(cache, name))
    match run.data:
        case TextData():
            return EvaluationData(name, _text_batches(run, run.data, task, prepared.tokenizers, prepared.shards[name]))
        case PairsData():
            batches = _pair_batches(run, prepared.shards[f"{name}.source"], prepared.shards[f"{name}.target"])
            return EvaluationData(name, batches, examples)
        case LabelsData():
            return EvaluationData(name, None, examples)
        case TreesData():
            return EvaluationData(name, _tree_batches(run, tagged_dataset(prepared.shards, f"{name}.")))
        case ImagesData():
            return EvaluationData(
                name, held_out_batches(image_dataset(prepared, f"{name}.", task), task, run.batch.tokens)
            )


def load_file(
    run: RunConfig, task: str, tokenizers: TokenizerPair, path: EvaluationPath, scratch_dir: Path
) -> EvaluationData:
    """Load other data of the run's kind; `scratch_dir` is a folder for shards. Raises UserError for bad data."""
    name = path if isinstance(path, str) else " and ".join(path)
    match run.data:
        case TextData():
            shard = write_text_shard(run.data, tokenizers.source, path, scratch_dir)
            return EvaluationData(name, _text_batches(run, run.data, task, tokenizers, shard))
        case PairsData():
            columns = run.data.source, run.data.target
            examples = _read_examples(open_table(path, columns, ("source", "target"), scratch_dir).rows(), path)
            source = _write_sources(scratch_dir, [example.source for example in examples], tokenizers.source)
            target = _write_targets(scratch_dir, [example.target for example in examples], tokenizers.target)
            return EvaluationData(name, _pair_batches(run, source, target), examples)
        case LabelsData():
            rows = open_table(path, (run.data.text, run.data.label), ("text", "label"), scratch_dir).rows()
            return EvaluationData(name, None, _read_examples(rows, path))
        case SyntheticData():
            raise UserError(
                f"{name}: this run was trained on generated data, not on files; score its split valid or test"
            )
        case TreesData():
            return EvaluationData(name, _tree_batches(run, _load_treebank(run.data, tokenizers, path, scratch_dir)))
        case ImagesData():
            images = image_dataset_of_files(run.data, tokenizers, path, scratch_dir, task)
            return EvaluationData(name, held_out_batches(images, task, run.batch.tokens))


def _text_batches(
    run: RunConfig, data: TextData, task: str, tokenizers: TokenizerPair, shard: TokenShard
) -> HeldOutBatches:
    masked = task == "masked-lm"
    rows = max(1, run.batch.tokens // data.length)
    layout = make_layout(data, shard, rows, shifted=not masked)
    batch_maker = MaskedBatches(data.masking, tokenizers.source.vocab) if masked else NextTokenBatches()
    plan = TextPlan(
        layout, rows, batch_maker, shard.facts.sha256, None if masked else open_neighbour_table(data.neighbours, shard)
    )
    return HeldOutBatches(plan.fixed_epoch(), _count_units(shard))


def _pair_batches(run: RunConfig, source: TokenShard, target: TokenShard) -> HeldOutBatches:
    pairs = PairDataset(source, target)
    plan = LengthBuckets(pairs, np.arange(len(pairs.lengths)), run.batch.tokens)
    return HeldOutBatches(plan.fixed_epoch(), _count_units(target))


def _tree_batches(run: RunConfig, tagged: TaggedDataset) -> HeldOutBatches:
    return HeldOutBatches(LengthBuckets(tagged, np.arange(len(tagged.lengths)), run.batch.tokens).fixed_epoch(), None)


def _load_treebank(
    data: TreesData, tokenizers: TokenizerPair, path: EvaluationPath, scratch_dir: Path
) -> TaggedDataset:
    """The sentences of treebank files, with the label ids of training."""
    paths = [path] if isinstance(path, str) else path
    rows = [row for file in paths for row in open_treebank(file, data.label, scratch_dir).rows()]
    if not rows:
        raise UserError(f"{path}: there is nothing in it")
    return tagged_dataset_of_rows(rows, tokenizers, scratch_dir)


def _count_units(shard: TokenShard) -> TextUnits:
    """The units that scores are relative to; every token except the first of a document is a target."""
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def write_text_shard(data: TextData, tokenizer: Tokenizer, path: EvaluationPath, scratch_dir: Path) -> TokenShard:
    """Tokenize the text at `path` and write it as the shard "text" in the folder `scratch_dir`."""
    with write_shards(scratch_dir, ["text"], tokenizer.vocab) as writers:
        for part in (part for source in text_sources(path, data.column, scratch_dir) for part in source.parts()):
            bos, eos = [tokenizer.bos] * part.starts_document, [tokenizer.eos] * part.ends_document
            ids = np.concatenate([bos, tokenizer.encode_array(part.text), eos])
            writers.shards["text"].add(ids, starts_document=part.starts_document, text=part.text)
    facts = writers.facts["text"]
    if not facts.characters:
        raise UserError(f"{path}: there is no text in it")
    return open_shard(scratch_dir, "text", facts)


def _write_sources(scratch_dir: Path, texts: Sequence[str], tokenizer: Tokenizer) -> TokenShard:
    rows = [np.append(tokenizer.encode_array(text), tokenizer.eos) for text in texts]
    return _write_shard(scratch_dir, "source", rows, texts, tokenizer.vocab)


def _write_targets(scratch_dir: Path, texts: Sequence[str], tokenizer: Tokenizer) -> TokenShard:
    rows = [np.concatenate([[tokenizer.bos], tokenizer.encode_array(text), [tokenizer.eos]]) for text in texts]
    return _write_shard(scratch_dir, "target", rows, texts, tokenizer.vocab)


def _write_shard(
    scratch_dir: Path, name: str, rows: Sequence[NDArray[np.int32]], texts: Sequence[str], vocab: int
) -> TokenShard:
    with write_shards(scratch_dir, [name], vocab) as writers:
        for ids, text in zip(rows, texts, strict=True):
            writers.shards[name].add(ids, starts_document=True, text=text)
    return open_shard(scratch_dir, name, writers.facts[name])


def _read_examples(rows: Iterable[TableRow], path: EvaluationPath) -> tuple[HeldOutExample, ...]:
    examples = tuple(HeldOutExample(row.cells[0], row.cells[1], row.location) for row in rows)
    if not examples:
        raise UserError(f"{path}: there is nothing in it")
    return examples
