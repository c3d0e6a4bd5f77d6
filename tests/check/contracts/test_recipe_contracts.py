"""Every recipe, present and future, keeps every promise of its card; nothing has to be written for a new one."""

import functools

import pytest

import manyformer as mf
from manyformer.check import CONTRACTS, CheckReport
from manyformer.recipes import RECIPES

APART = {"compile", "learns"}
"""Contracts that take seconds and have their own files."""

ALWAYS = {"repeatable", "traceless", "batch", "gradients", "loss", "float64", "bfloat16", "saving", "spec"}
CAUSAL = {"causal", "causal-gradient"}
STREAMS = {"cached", "prefill", "preallocated", "rewind", "decode", "beams"}
PADDING = {"padding-right", "padding-left", "empty-rows"}


@functools.cache
def report_on(recipe: str) -> CheckReport:
    return mf.check(recipe, skip=APART)


@pytest.mark.parametrize("contract", [name for name in CONTRACTS if name not in APART])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_promise(recipe: str, contract: str) -> None:
    row = report_on(recipe)[contract]
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
        promised |= {"packing"} if card.task.name != "classification" else set()
        promised |= {"source-padding"} if "cross_attention" in card.promises else set()
    rows = report_on(recipe).rows
    assert {row.contract for row in rows if row.verdict == "passed"} - {"float16"} == promised - card.reasons.keys()
    assert {row.contract for row in rows if row.verdict == "not run"} <= {"float16"}
