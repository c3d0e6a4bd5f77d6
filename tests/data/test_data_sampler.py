"""The sampler: exact resume anywhere, ranks that together see what one sees, budgets kept."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyformer.base.errors import UserError
from manyformer.config import LabelsData, PairsData, TextData
from manyformer.data import OpenedData, Sampler, open_data
from manyformer.data.batching.length_buckets import bucket_bounds
from manyformer.nn.batches import IGNORE_INDEX, Batch, ClassificationBatch, Seq2SeqBatch
from manyformer.nn.batches.batch import with_layouts

WORDS = ["a", "dog", "runs", "over", "the", "wide", "green", "field", "quickly", "today"]


def write_text(folder: Path) -> Path:
    pick = random.Random(1)
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(" ".join(pick.choices(WORDS, k=pick.randint(3, 90))))
    return folder


def write_pairs(folder: Path, *, rows: int = 300) -> Path:
    pick = random.Random(2)
    lines = []
    for number in range(rows):
        source = " ".join(pick.choices(WORDS, k=pick.randint(1, 12)))
        lines.append(f"{source} {number}\t{source.upper()[: pick.randint(1, 60)]}\n")
    (folder / "pairs.tsv").write_text("".join(lines))
    return folder / "pairs.tsv"


def opened(what: str, folder: Path, seed: int = 0, **changed: Any) -> OpenedData:
    (folder / "text").mkdir(exist_ok=True)
    cache = folder / f"cache-{what}"
    if what in ("concat", "documents", "masked"):
        packing = "concat" if what == "concat" else "documents"
        config: Any = TextData(path=str(write_text(folder / "text")), length=32, packing=packing, valid=0.2)
        task = "masked" if what == "masked" else "next-token"
        return open_data(config, task, batch_tokens=160, cache=cache, seed=seed, **changed)
    path = str(write_pairs(folder))
    if what == "pairs":
        config, task = PairsData(path=path, tokenizer="byte", valid=0.2), "pairs"
    else:
        labels = (folder / "labels.tsv").open("w")
        with labels:
            labels.writelines(f"{' '.join(WORDS[: 1 + i % 9])} {i}\tclass {i % 3}\n" for i in range(200))
        config, task = LabelsData(path=str(folder / "labels.tsv"), tokenizer="byte"), "labelled"
    return open_data(config, task, batch_tokens=400, cache=cache, seed=seed, **changed)


KINDS = ["concat", "documents", "masked", "pairs", "labels"]


def same(one: Batch, other: Batch) -> bool:
    if type(one) is not type(other):
        return False
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other))


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """What a process gets of a batch: every row whose number has this rank, and the layout of these rows."""
    rows = (field[rank::world] if isinstance(field, torch.Tensor) else None for field in batch)
    return with_layouts(type(batch)(*rows))


@pytest.mark.parametrize("what", KINDS)
def test_resuming_anywhere_gives_the_same_batches(what: str, tmp_path: Path) -> None:
    sampler = opened(what, tmp_path).train
    states, batches = [], []
    for _ in range(sampler.batches * 2 + 3):
        # Through JSON, as a checkpoint keeps it.
        states.append(json.dumps(sampler.state_dict()))
        batches.append(next(sampler))
    assert sampler.epoch == 2
    for place in random.Random(3).sample(range(len(states)), 6):
        again = opened(what, tmp_path).train
        again.load_state_dict(json.loads(states[place]))
        assert all(same(next(again), batch) for batch in batches[place : place + 5])
    # Going back from where it stands works as well as from the beginning.
    sampler.load_state_dict(json.loads(states[1]))
    assert same(next(sampler), batches[1])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_see_what_one_sees(what: str, world: int, tmp_path: Path) -> None:
    alone = opened(what, tmp_path).train
    ranks = [opened(what, tmp_path).train.shard(rank, world) for rank in range(world)]
    for _ in range(alone.batches + 2):
        full, parts = next(alone), [next(rank) for rank in ranks]
        for rank, part in enumerate(parts):
            if rank < len(full[0]):
                assert same(part, share_of(full, rank, world))
        assert sum(map(scored, parts)) == scored(full)
    assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


@pytest.mark.parametrize("what", KINDS)
def test_the_order_survives_a_change_of_the_number_of_processes(what: str, tmp_path: Path) -> None:
    """Two processes, then one, then four, each from the position that the one before has saved."""
    expected = [next(sampler) for sampler in [opened(what, tmp_path).train] for _ in range(6)]
    position = opened(what, tmp_path).train.state_dict()
    for number, world in enumerate((2, 1, 4)):
        ranks = [opened(what, tmp_path).train.shard(rank, world) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(position)
        for full in expected[2 * number : 2 * number + 2]:
            parts = [next(rank) for rank in ranks]
            for rank, part in enumerate(parts):
                if rank < len(full[0]):
                    assert same(part, share_of(full, rank, world))
        (position,) = {json.dumps(rank.state_dict()): rank.state_dict() for rank in ranks}.values()


def scored(batch: Batch) -> int:
    targets = batch.labels if isinstance(batch, ClassificationBatch) else batch.targets
    return int((targets != IGNORE_INDEX).sum())


def test_other_tokens_are_masked_in_every_epoch(tmp_path: Path) -> None:
    sampler = opened("masked", tmp_path).train
    chosen: list[set[int]] = [set(), set()]
    for epoch in (0, 1):
        while sampler.epoch == epoch:
            batch = next(sampler)
            full = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, batch.targets)
            for tokens, targets in zip(full, batch.targets):
                row = hash(tuple(tokens.tolist()))
                chosen[epoch] |= {hash((row, int(place))) for place in (targets != IGNORE_INDEX).nonzero()}
    both = len(chosen[0] & chosen[1])
    # By chance 15 of 100 are chosen again.
    assert 0 < both < 0.4 * len(chosen[0])


def test_a_rank_without_rows_gets_one_that_counts_nothing(tmp_path: Path) -> None:
    sampler = opened("documents", tmp_path).train.shard(5, 6)
    for _ in range(sampler.batches):
        batch = next(sampler)
        assert len(batch.tokens) >= 1
        assert scored(batch) == 0


@pytest.mark.parametrize("what", KINDS)
def test_seeds_decide_the_order_and_nothing_else(what: str, tmp_path: Path) -> None:
    one, again, other = (opened(what, tmp_path, seed).train for seed in (0, 0, 1))
    batches = [[next(sampler) for _ in range(5)] for sampler in (one, again, other)]
    assert all(same(a, b) for a, b in zip(batches[0], batches[1]))
    assert not all(same(a, b) for a, b in zip(batches[0], batches[2]))
    valid = [list(opened(what, tmp_path, seed).valid) for seed in (0, 1)]
    assert all(same(a, b) for a, b in zip(*valid, strict=True))
    held = opened(what, tmp_path).valid
    assert all(same(a, b) for a, b in zip(held, held, strict=True))


@pytest.mark.parametrize("what", ["pairs", "labels"])
def test_budgets_hold_and_nothing_is_lost(what: str, tmp_path: Path) -> None:
    data = opened(what, tmp_path)
    for number in range(2):
        seen: Counter[str] = Counter()
        while data.train.epoch == number:
            batch = next(data.train)
            first = batch.source if isinstance(batch, Seq2SeqBatch) else batch.tokens
            sides = [first] + ([batch.target] if isinstance(batch, Seq2SeqBatch) else [])
            assert max(side.numel() for side in sides) <= 400
            seen.update(data.source.decode(row.tolist()) for row in first)
        expected = {one.source for one in data.examples("valid")}
        lines = (tmp_path / f"{what}.tsv").read_text().splitlines()
        sources = {line.split("\t")[0] for line in lines}
        assert set(seen) | expected == sources
        assert not set(seen) & expected
        assert set(seen.values()) == {1}


def test_pairs_are_shifted_and_padded(tmp_path: Path) -> None:
    (tmp_path / "few.tsv").write_text("ab\txyz\nabcde\tx\n" * 4 + "q\tr\n" * 4)
    (tmp_path / "held.tsv").write_text("ab\txyz\nabcde\tx\n")
    config = PairsData(path=str(tmp_path / "few.tsv"), valid=str(tmp_path / "held.tsv"), tokenizer="byte")
    data = open_data(config, "pairs", batch_tokens=20, cache=tmp_path / "run", seed=0)
    (batch,) = data.valid
    code = {sign: ord(sign) + 5 for sign in "abcdexyz"}
    a, b, c, d, e, x, y, z = (code[sign] for sign in "abcdexyz")
    assert batch.source.tolist() == [[a, b, 2, 0, 0, 0], [a, b, c, d, e, 2]]
    assert batch.target.tolist() == [[1, x, y, z], [1, x, 0, 0]]
    assert batch.targets.tolist() == [[x, y, z, 2], [x, 2, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch.source_segments.tolist() == [[0, 0, 0, -1, -1, -1], [0] * 6]
    assert batch.target_segments.tolist() == [[0] * 4, [0, 0, -1, -1]]
    assert (data.valid.units.targets, data.valid.units.characters) == (6, 4)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(60, 500))
@settings(max_examples=100, deadline=None)
def test_cuts_fill_the_budget(lengths: list[int], budget: int) -> None:
    ordered = np.sort(np.array(lengths))
    bounds = bucket_bounds(ordered, budget)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    for begin, end in pairwise(bounds):
        assert (end - begin) * ordered[end - 1] <= budget
        # One more would not have fitted.
        assert end == len(lengths) or (end + 1 - begin) * ordered[end] > budget


def test_positions_in_other_data_are_refused(tmp_path: Path) -> None:
    state = opened("documents", tmp_path).train.state_dict()
    with pytest.raises(UserError, match="the data differs from what this run was trained on"):
        opened("concat", tmp_path).train.load_state_dict(state)
    with pytest.raises(UserError, match="started with seed 0, but the seed is 4"):
        opened("documents", tmp_path, seed=4).train.load_state_dict(state)
    (tmp_path / "text" / "00.txt").write_text("something else entirely")
    fresh = tmp_path / "other"
    fresh.mkdir()
    config = TextData(path=str(tmp_path / "text"), length=32, valid=0.2)
    changed: Sampler = open_data(config, "next-token", batch_tokens=160, cache=fresh, seed=0).train
    with pytest.raises(UserError, match="the data differs from what this run was trained on"):
        changed.load_state_dict(state)
