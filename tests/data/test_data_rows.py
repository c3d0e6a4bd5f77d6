"""Text in rows: no target lost or doubled in an epoch, segments that match documents, masks as they should be."""

import itertools
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyformer.data.batching.epochs import random_generator
from manyformer.data.batching.row_layouts import (
    DocumentLayout,
    LaneLayout,
    RandomWindowLayout,
    RowArrangement,
    RowLayout,
    TextRows,
    WindowLayout,
    best_fit,
)
from manyformer.data.batching.text_epochs import NextTokenBatches, NoisedBatches, TextPlan, mask_tokens
from manyformer.data.storage.token_shards import ShardFacts, TokenShard
from manyformer.data.tokenizers.native_tokenizers import CharTokenizer
from manyformer.nn.batches import IGNORE_INDEX, NoisedBatch

BOS, EOS = 1, 2
THOUSAND = CharTokenizer(map(chr, range(1000, 1995)))
"""A tokenizer with 1,000 tokens."""
DOCUMENTS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def shard_of(sizes: list[int]) -> TokenShard:
    """Documents with these numbers of tokens between BOS and EOS; every ordinary token occurs once."""
    after = itertools.count(5)
    tokens = [[BOS, *itertools.islice(after, size), EOS] for size in sizes]
    flat = np.array([token for document in tokens for token in document], dtype=np.uint16)
    offsets = np.cumsum([0, *map(len, tokens)])
    return TokenShard(flat, offsets, ShardFacts(len(flat), len(sizes), 0, 0, "uint16", int(flat.max(initial=0)), ""))


def documents(shard: TokenShard) -> list[list[int]]:
    return [shard.tokens[a:b].tolist() for a, b in itertools.pairwise(shard.offsets)]


def everything(arrangement: RowArrangement) -> TextRows:
    return arrangement.rows(np.arange(arrangement.count))


def pairs_of(rows: TextRows) -> Counter[tuple[int, int]]:
    scored = rows.targets != IGNORE_INDEX
    return Counter(zip(rows.tokens[scored].tolist(), rows.targets[scored].tolist(), strict=True))


@given(DOCUMENTS, st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("shape", [WindowLayout, partial(DocumentLayout, pad=0)], ids=["windows", "documents"])
def test_every_target_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    shape: Any,
    sizes: list[int],
    length: int,
    seed: int,
) -> None:
    shard = shard_of(sizes)
    # What follows what inside each document: that is what a language model has to learn, no less and no more.
    expected = Counter(pair for tokens in documents(shard) for pair in itertools.pairwise(tokens))
    layout: RowLayout = shape(shard, length, shifted=True)
    for random in (None, random_generator(seed, 0), random_generator(seed, 1)):
        rows = everything(layout.arrange(random))
        assert pairs_of(rows) == expected
        assert rows.tokens.shape[1] == length or len(rows.tokens) == 1


@given(DOCUMENTS, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("shape", [WindowLayout, partial(DocumentLayout, pad=0)], ids=["windows", "documents"])
def test_without_a_shift_every_token_once(shape: Any, sizes: list[int], length: int) -> None:
    shard = shard_of(sizes)
    layout: RowLayout = shape(shard, length, shifted=False)
    for random in (None, random_generator(0, 0)):
        rows = everything(layout.arrange(random))
        assert Counter(rows.tokens[rows.is_first_copy].tolist()) == Counter(shard.tokens.tolist())


@given(DOCUMENTS, st.integers(2, 40))
@settings(max_examples=100, deadline=None)
def test_a_segment_is_a_stretch_of_one_document(sizes: list[int], length: int) -> None:
    shard = shard_of(sizes)
    rows = everything(DocumentLayout(shard, length, shifted=True, pad=0))
    full = [" ".join(map(str, tokens)) + " " for tokens in documents(shard)]
    segments = np.zeros_like(rows.tokens) if rows.segments is None else rows.segments
    for tokens, targets, row in zip(rows.tokens, rows.targets, segments):
        used = row[row >= 0]
        # Numbered from 0 without gaps, one after the other, padding at the end alone.
        assert used.tolist() == sorted(used.tolist())
        assert set(used.tolist()) == set(range(int(used.max()) + 1))
        assert (row[len(used) :] == -1).all()
        assert (tokens[len(used) :] == 0).all()
        assert (targets[len(used) :] == IGNORE_INDEX).all()
        for number in set(used.tolist()):
            inside = row == number
            stretch = [*tokens[inside].tolist(), int(targets[inside][-1])]
            assert any(" ".join(map(str, stretch)) + " " in text for text in full)


@given(st.lists(st.integers(1, 50), max_size=300))
@settings(max_examples=100, deadline=None)
def test_best_fit_never_overfills_and_wastes_little(sizes: list[int]) -> None:
    rows = best_fit(np.array(sizes, dtype=np.int64), 50)
    filled = np.bincount(rows, weights=sizes) if sizes else np.zeros(0)
    assert (filled <= 50).all()
    assert (filled > 0).all()
    # No two rows could be one.
    assert sum(room <= 25 for room in filled) <= 1


def test_windows_begin_elsewhere_in_every_epoch() -> None:
    plan = TextPlan(WindowLayout(shard_of([500]), 10, shifted=True), 4, NextTokenBatches(), "x")
    for number in range(3):
        epoch = plan.epoch(0, number)
        batches = [epoch.batch(i) for i in range(len(epoch))]
        assert all(batch.segments is None for batch in batches)
        assert [tuple(batch.tokens.shape) for batch in batches[:-1]] == [(4, 10)] * (len(batches) - 1)
    assert len({tuple(plan.epoch(0, n).batch(0).tokens.flatten().tolist()) for n in range(3)}) == 3
    assert not (plan.epoch(0, 0).batch(0).tokens == plan.epoch(1, 0).batch(0).tokens).all()


def test_full_rows_of_one_document_need_no_segments() -> None:
    rows = everything(DocumentLayout(shard_of([39]), 10, shifted=True, pad=0))
    assert rows.segments is None
    assert rows.tokens.shape == (4, 10)


@pytest.mark.parametrize(
    "layout",
    [WindowLayout, partial(DocumentLayout, pad=0), partial(LaneLayout, rows=3, pad=0)],
    ids=["windows", "documents", "lanes"],
)
@pytest.mark.parametrize("mixed", [False, True], ids=["fixed", "mixed"])
def test_places_tell_where_tokens_are_from(layout: Any, mixed: bool) -> None:
    shard = shard_of([15, 38, 0, 21])
    arrangement = layout(shard, length=10, shifted=True).arrange(random_generator(0) if mixed else None)
    numbers = np.arange(arrangement.count)
    rows, places = arrangement.rows(numbers), arrangement.token_indices(numbers)
    there = places >= 0
    assert (rows.tokens[there] == shard.tokens[places[there]]).all()
    assert (there >= rows.is_first_copy).all()
    scored = rows.targets != IGNORE_INDEX
    following = places[scored] + 1
    assert (rows.targets[scored] == shard.tokens[following]).all()
    # every token but those that begin a document
    assert sorted(following) == sorted(set(range(82)) - {0, 17, 57, 59})


def masked_rows(count: int, length: int) -> TextRows:
    tokens = np.random.default_rng(0).integers(5, 1000, (count, length))
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    return TextRows(tokens, tokens, None, np.ones_like(tokens, dtype=bool))


def test_masks_are_fifteen_percent_and_eighty_ten_ten() -> None:
    rows = masked_rows(800, 128)
    tokens, targets = mask_tokens(rows, 0.15, THOUSAND, random_generator(0))
    chosen = targets != IGNORE_INDEX
    assert (targets[chosen] == rows.tokens[chosen]).all()
    assert (tokens[~chosen] == rows.tokens[~chosen]).all()
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    # Standard errors are 0.0011 of the share and 0.003 of the parts.
    assert chosen[:, 1:-1].mean() == pytest.approx(0.15, abs=0.006)
    became_mask, stayed = tokens[chosen] == 4, tokens[chosen] == rows.tokens[chosen]
    assert became_mask.mean() == pytest.approx(0.8, abs=0.015)
    assert stayed.mean() == pytest.approx(0.1, abs=0.015)
    other = tokens[chosen][~became_mask & ~stayed]
    assert len(other) / chosen.sum() == pytest.approx(0.1, abs=0.015)
    assert other.min() >= 5
    assert other.max() < 1000
    assert len(set(other.tolist())) > 500


def test_every_row_has_something_to_fill_in() -> None:
    rows = masked_rows(500, 4)
    tokens, targets = mask_tokens(rows, 0.15, THOUSAND, random_generator(1))
    chosen = targets != IGNORE_INDEX
    assert chosen.any(1).all()
    assert (tokens[chosen] == 4).mean() == pytest.approx(0.8, abs=0.06)
    # A row of special tokens alone has nothing.
    empty = TextRows(np.array([[BOS, EOS, 0]]), np.zeros((1, 3), np.int64), None, np.ones((1, 3), bool))
    assert (mask_tokens(empty, 0.15, THOUSAND, random_generator(1))[1] == IGNORE_INDEX).all()


def test_masks_depend_on_their_seeds_alone() -> None:
    rows = masked_rows(20, 50)
    one, again, other = (
        mask_tokens(rows, 0.15, THOUSAND, random_generator(*seeds)) for seeds in ((1, 2), (1, 2), (1, 3))
    )
    assert (one[0] == again[0]).all()
    assert (one[1] == again[1]).all()
    assert (one[1] != other[1]).any()


@given(DOCUMENTS.filter(any), st.integers(1, 40), st.integers(0, 5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_windows_are_parts_of_the_text_with_the_tokens_that_follow(
    sizes: list[int], length: int, seed: int, shifted: bool
) -> None:
    shard = shard_of(sizes)
    layout = RandomWindowLayout(shard, length, shifted=shifted)
    drawn = layout.arrange(random_generator(seed, 0))
    rows = everything(drawn)
    text = shard.tokens.tolist()
    assert len(rows.tokens) == -(-(len(text) - shifted) // rows.tokens.shape[1])
    for start, tokens, targets in zip(
        drawn.token_indices(np.arange(drawn.count))[:, 0], rows.tokens, rows.targets, strict=True
    ):
        assert tokens.tolist() == text[start : start + len(tokens)]
        following = [*text[start + 1 : start + 1 + len(tokens)], text[0]][: len(tokens)]
        # the start of a document is given, not predicted
        assert targets.tolist() == [IGNORE_INDEX if token == BOS else token for token in following]
    assert np.array_equal(
        everything(layout.arrange(None)).tokens,
        everything(WindowLayout(shard, length, shifted=shifted).arrange(None)).tokens,
    )


def test_random_windows_reach_every_token_and_are_drawn_anew_in_each_epoch() -> None:
    shard = shard_of([60])
    layout = RandomWindowLayout(shard, 8, shifted=True)
    epochs = [layout.arrange(random_generator(0, number)) for number in range(60)]
    starts = [epoch.token_indices(np.arange(epoch.count))[:, 0] for epoch in epochs]
    assert set(np.concatenate(starts)) == set(range(len(shard.tokens) - 8))
    assert not np.array_equal(starts[0], starts[1])
    assert np.array_equal(starts[1], layout.arrange(random_generator(0, 1)).token_indices(np.arange(8))[:, 0])


def test_a_diffusion_hides_ordinary_tokens_once_and_stratifies_its_levels() -> None:
    shard = shard_of([5, 12, 3])
    rows = everything(DocumentLayout(shard, 8, shifted=False, pad=0).arrange(None))
    maker = NoisedBatches(THOUSAND)
    batch = maker.make_batch(rows, (1, 2))
    targets = batch.targets[batch.targets != IGNORE_INDEX].tolist()
    # every token of the text but the starts of its documents, which are given
    assert sorted(targets) == sorted(token for document in documents(shard) for token in document[1:])
    assert batch.target_count() == len(targets)
    count = len(batch.tokens)
    levels = batch.noise[..., 0].double()
    # in each column another part of the range for each row, at one place in it
    assert ((levels * count).floor().sort(dim=0).values == torch.arange(count)[:, None]).all()
    places = levels * count % 1
    assert float((places - places[:1]).abs().max()) < 1e-4
    again, others = (maker.make_batch(rows, seeds).noise for seeds in ((1, 2), (1, 3)))
    assert torch.equal(again, batch.noise)
    assert not torch.equal(others, batch.noise)


def test_held_out_noise_is_the_same_in_every_pass() -> None:
    plan = TextPlan(DocumentLayout(shard_of([20, 30]), 8, shifted=False, pad=0), 2, NoisedBatches(THOUSAND), "x")
    passes = [[epoch.batch(number) for number in range(len(epoch))] for epoch in (plan.fixed_epoch(),) * 2]
    for first, second in zip(*passes, strict=True):
        assert isinstance(first, NoisedBatch)
        assert isinstance(second, NoisedBatch)
        assert torch.equal(first.noise, second.noise)
    trained = [plan.epoch(0, number).batch(0) for number in (0, 1)]
    noise = [batch.noise for batch in trained if isinstance(batch, NoisedBatch)]
    assert not torch.equal(*noise)
