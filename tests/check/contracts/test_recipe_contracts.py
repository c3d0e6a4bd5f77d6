"""Every recipe, present and future, keeps every promise of its card; nothing has to be written for a new one."""

import functools

import pytest

import manyformer as mf
from manyformer.check import CONTRACTS, ContractRow
from manyformer.check.tiny_models import build_tiny
from manyformer.recipes import RECIPES

APART = {"compile", "learns"}
"""Contracts that take seconds and have their own files."""

EXCHANGES = {"causal", "causal-training"}
"""Contracts that exchange every token, whose time grows at least with the square of the length."""

ORDINARY_LENGTH = 96
"""Their length when slow tests are left out: longer than the chunks and windows of the tiny models."""

ALWAYS = {
    "repeatable",
    "traceless",
    "batch",
    "batch-training",
    "gradients",
    "loss",
    "float64",
    "bfloat16",
    "saving",
    "spec",
}
CAUSAL = EXCHANGES | {"causal-gradient"}
STREAMS = {"cached", "prefill", "preallocated", "rewind", "decode", "beams"}
PADDING = {"padding-right", "padding-left", "empty-rows"}


@functools.cache
def rows_on(recipe: str) -> dict[str, ContractRow]:
    rows = mf.check(recipe, skip=APART | EXCHANGES).rows
    length = min(ORDINARY_LENGTH, build_tiny(recipe, {}, 0).max_length or ORDINARY_LENGTH)
    return {row.contract: row for row in (*rows, *mf.check(recipe, only=EXCHANGES, length=length).rows)}


@pytest.mark.parametrize("contract", [name for name in CONTRACTS if name not in APART])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_promise(recipe: str, contract: str) -> None:
    row = rows_on(recipe)[contract]
    assert row.verdict != "failed", row.sentence


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_only_what_the_card_excuses_is_left_out(recipe: str) -> None:
    card = RECIPES[recipe].card
    promised, streams = set(ALWAYS), "incremental_decoding" in card.promises
    if "causal" in card.promises:
        promised |= CAUSAL
    if streams:
        promised |= STREAMS
    if "padding_invariant" in card.promises:
        promised |= PADDING
        promised |= {"padding-state", "padding-ragged", "packing-state"} if streams else set()
        promised |= {"packing"} if card.task.per_token else set()
        promised |= {"source-padding"} if "cross_attention" in card.promises else set()
    excused = {*card.reasons, *card.task.reasons, *card.task.model_reasons(build_tiny(recipe, {}, 0))}
    promised -= {name for name in promised if {name, *CONTRACTS[name].needs} & excused}
    rows = rows_on(recipe).values()
    assert {row.contract for row in rows if row.verdict == "passed"} - {"float16"} == promised
    assert {row.contract for row in rows if row.verdict == "not run"} <= {"float16"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(name for name, entry in RECIPES.items() if "causal" in entry.card.promises))
def test_no_later_token_is_seen_in_long_sequences(recipe: str) -> None:
    report = mf.check(recipe, only=EXCHANGES)
    assert report.ok, report.table()
