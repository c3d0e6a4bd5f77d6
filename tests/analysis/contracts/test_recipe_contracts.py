"""Every recipe, present and future, keeps every promise of its card; nothing has to be written for a new one."""

import pytest

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS
from manyformer.analysis.own_models import build_tiny
from manyformer.recipes import RECIPES

APART = {"compile", "learns"}
"""Contracts that take seconds and have their own files."""

LONG = {"causal", "causal-training", "causal-autocast", "causal-gradient", "length", "traceless"}
"""Contracts of long sequences, of which some exchange every token: their time grows with the square of the length."""

ORDINARY_LENGTH = 96
"""Their length when slow tests are left out: longer than the chunks and windows of the tiny models."""

ORDINARY_STEPS = 32
"""The length of the others, most of which decode token by token: twice the windows and blocks of the tiny models."""

ALWAYS = {
    "repeatable",
    "seed",
    "traceless",
    "batch",
    "batch-training",
    "gradients",
    "loss",
    "float64",
    "bfloat16",
    "saving",
    "own-state",
    "spec",
}
CAUSAL = LONG - {"traceless"}
STREAMS = {"cached", "prefill", "preallocated", "rewind", "decode", "beams"}
PADDING = {"padding-right", "padding-left", "empty-rows"}


FIRST = {"causal", "causal-gradient", "cached", "batch", "padding-right"}
FIRST |= {"packing", "gradients", "loss", "saving", "spec"}
"""Contracts of every recipe in the ordinary tests; all the others take most of the time and are thinned."""


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_first_promise_is_broken_or_left_out(recipe: str) -> None:
    most = build_tiny(recipe, {}, 0).max_length or ORDINARY_STEPS
    report = mf.check(recipe, only=FIRST, length=min(ORDINARY_STEPS, most))
    assert report.ok, report.table()
    assert {row.contract for row in report.rows if row.verdict == "passed"} == FIRST & promised(recipe)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_promises_are_kept_and_only_what_the_card_excuses_is_left_out(recipe: str) -> None:
    """One test for all contracts of a recipe, whose model is built once."""
    most = build_tiny(recipe, {}, 0).max_length or ORDINARY_LENGTH
    rows = [
        *mf.check(recipe, skip=APART | LONG, length=min(ORDINARY_STEPS, most)).rows,
        *mf.check(recipe, only=LONG, length=min(ORDINARY_LENGTH, most)).rows,
    ]
    assert {row.contract for row in rows} == CONTRACTS.keys() - APART
    assert {row.contract: row.sentence for row in rows if row.verdict == "failed"} == {}
    assert {row.contract for row in rows if row.verdict == "passed"} - {"float16"} == promised(recipe)
    assert {row.contract for row in rows if row.verdict == "not run"} <= {"float16"}


def promised(recipe: str) -> set[str]:
    """The contracts that the card of a recipe promises, without those that it, its task or its model excuses."""
    card = RECIPES[recipe].card
    contracts = set(ALWAYS)
    streams = "incremental_decoding" in card.promises
    if "causal" in card.promises:
        contracts |= CAUSAL
    if streams:
        contracts |= STREAMS
    if "padding_invariant" in card.promises:
        contracts |= PADDING
        contracts |= {"padding-state", "padding-ragged", "packing-state"} if streams else set()
        contracts |= {"packing"} if card.task.per_token else set()
        contracts |= {"source-padding"} if "cross_attention" in card.promises else set()
    excused = {*card.reasons, *card.task.reasons, *card.task.model_reasons(build_tiny(recipe, {}, 0))}
    return {name for name in contracts if not {name, *CONTRACTS[name].needs} & excused}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_promises_are_kept_in_sequences_as_long_as_those_of_a_user(recipe: str) -> None:
    report = mf.check(recipe, skip=APART)
    assert report.ok, report.table()
