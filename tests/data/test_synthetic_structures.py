"""ListOps, automata and drawn paths against definitions written out, and the labelled form of classifiers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.config.data_sections import (
    ListOpsData,
    MQARData,
    PathfinderData,
    RegularLanguageData,
    StateTrackingData,
)
from manyformer.data import open_data, open_held_out
from manyformer.data.generated.synthetic import make_rule
from manyformer.data.pipeline.kind import OpenRequest

LISTS = ListOpsData(length=60, min_tokens=10, depth=5, max_args=4)


def value_and_rest(tokens: list[int], depth: int = 1) -> tuple[int, list[int], int]:
    """The value of the expression at the beginning, the tokens behind it, and its depth."""
    head, *rest = tokens
    if head < 10:
        return head, rest, depth
    arguments, deepest = [], depth
    while rest[0] != 14:
        value, rest, below = value_and_rest(rest, depth + 1)
        arguments.append(value)
        deepest = max(deepest, below)
    assert 2 <= len(arguments) <= 4
    median = int(np.median(arguments))
    value = {10: min(arguments), 11: max(arguments), 12: median, 13: sum(arguments) % 10}[head]
    return value, rest[1:], deepest


def test_expressions_have_their_values() -> None:
    generated = make_rule(LISTS).rows(np.random.default_rng(0), 300)
    operations, depths = set(), set()
    for symbols, targets in zip(generated.symbols, generated.targets):
        tokens = symbols[symbols >= 0].tolist()
        assert 10 < len(tokens) < 60
        assert (symbols[len(tokens) :] == -1).all()
        value, rest, depth = value_and_rest(tokens)
        assert rest == []
        assert targets.tolist() == [-1] * (len(tokens) - 1) + [value] + [-1] * (60 - len(tokens))
        operations.update(token for token in tokens if token > 9)
        depths.add(depth)
    assert operations == {10, 11, 12, 13, 14}
    assert depths == {3, 4, 5} | depths
    assert max(depths) == 5


def test_an_expression_that_is_too_rare_is_refused() -> None:
    with pytest.raises(ValueError, match="must be below 17, the tokens of the longest expression of depth 3"):
        ListOpsData(depth=3, max_args=3, min_tokens=17, length=99)
    with pytest.raises(ValueError, match=r"must be below data\.length - 2"):
        ListOpsData(min_tokens=62, length=64)
    rare = ListOpsData(depth=5, max_args=2, min_tokens=40, length=99)
    with pytest.raises(UserError, match="none of 100,000 expressions has more than 40 tokens"):
        make_rule(rare).rows(np.random.default_rng(0), 30)


def test_strings_are_those_of_one_automaton() -> None:
    data = RegularLanguageData(length=300, symbols=6, min_states=3, max_states=3, edges=2, max_string=20)
    generated = make_rule(data).rows(np.random.default_rng(0), 30)
    assert (generated.symbols[:, 1:] == generated.targets[:, :-1]).all()
    for symbols in generated.symbols.tolist():
        strings = "".join(chr(ord("a") + symbol) for symbol in symbols).split("g")
        assert all(1 <= len(string) <= 20 for string in strings[:-1])
        assert len({string[0] for string in strings if string}) <= 2
        # a deterministic automaton of three states has at most three kinds of continuations, of two symbols each
        continuations: dict[str, set[str]] = {}
        for string in strings:
            for end in range(len(string)):
                continuations.setdefault(string[:end], set()).add(string[end])
        assert all(len(following) <= 2 for following in continuations.values())


def test_forced_symbols_are_never_contradicted() -> None:
    settings: dict[str, Any] = {"length": 300, "symbols": 6, "max_string": 20}
    every, forced = (
        make_rule(RegularLanguageData(**settings, scored=scored)).rows(np.random.default_rng(5), 30)
        for scored in ("all", "forced")
    )
    assert (every.symbols == forced.symbols).all()
    scored = forced.targets >= 0
    assert (forced.targets[scored] == every.targets[scored]).all()
    assert 0.05 < scored.mean() < 0.4
    assert (forced.targets < 6).all(), "the end of a string is no forced symbol"
    for symbols, targets in zip(forced.symbols.tolist(), forced.targets.tolist()):
        contradicted = dict[tuple[int, ...], int]()
        start = 0
        for column, (symbol, target) in enumerate(zip(symbols, targets)):
            start = column + 1 if symbol == 6 else start
            prefix = tuple(symbols[start : column + 1])
            if target >= 0:
                assert contradicted.setdefault(prefix, target) == target


def test_paths_join_the_disks_in_half_of_the_images() -> None:
    data = PathfinderData(size=32, dashes=6, distractors=3)
    generated = make_rule(data).rows(np.random.default_rng(0), 200)
    assert generated.symbols.shape == (200, 1024)
    assert generated.symbols.min() == 0
    assert generated.symbols.max() == 15
    assert (generated.targets[:, :-1] == -1).all()
    answers = generated.targets[:, -1]
    assert set(answers.tolist()) == {0, 1}
    assert answers.mean() == pytest.approx(0.5, abs=0.11)


def components(image: np.ndarray) -> list[set[tuple[int, int]]]:
    """The connected bright areas of an image, with diagonal neighbours."""
    remaining = {(int(row), int(column)) for row, column in zip(*np.nonzero(image))}
    areas = []
    while remaining:
        area, queue = set[tuple[int, int]](), [remaining.pop()]
        while queue:
            row, column = queue.pop()
            area.add((row, column))
            around = {(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & remaining
            remaining -= around
            queue += around
        areas.append(area)
    return areas


def test_drawn_paths_are_apart_and_disks_are_at_ends() -> None:
    """Two paths without gaps are two areas; both disks touch one of them if the answer is 1, else one each."""
    from manyformer.data.generated.synthetic import structure_rules

    data = PathfinderData(size=48, dashes=8, distractors=0, levels=64)
    gap, structure_rules.GAP = structure_rules.GAP, 0.0
    try:
        generated = make_rule(data).rows(np.random.default_rng(3), 60)
    finally:
        structure_rules.GAP = gap
    decided = 0
    for symbols, targets in zip(generated.symbols, generated.targets):
        image = symbols.reshape(48, 48)
        areas = sorted(components(image > 24), key=len)[-2:]
        if len(areas) < 2 or min(map(len, areas)) < 16:
            continue
        # lines are too thin for four pixels as bright as these
        bright = image > 53
        squares = np.argwhere(bright[:-1, :-1] & bright[1:, :-1] & bright[:-1, 1:] & bright[1:, 1:]).tolist()
        touched = {number for number, area in enumerate(areas) for square in squares if tuple(square) in area}
        decided += 1
        assert len(touched) == (1 if targets[-1] else 2)
    assert decided > 30


@pytest.mark.parametrize(
    "data", [LISTS, StateTrackingData(group="S3", length=12, scored="all"), PathfinderData(size=16, dashes=3)]
)
def test_classifiers_read_the_row_and_its_last_answer(data: Any, tmp_path: Path) -> None:
    data = data.model_copy(update={"valid": 4 * data.row_length})
    opened = open_data(data, "labelled", batch_tokens=3 * data.row_length, cache=tmp_path, seed=0)
    rows = open_data(data, "next-token", batch_tokens=3 * data.length, cache=tmp_path, seed=0)
    batch, causal = next(opened.train), next(rows.train)
    assert opened.required_keywords == {"vocab": data.alphabet + 5, "classes": data.classes}
    assert opened.labels == tuple(map(str, range(data.classes)))
    for row in range(3):
        symbols = causal[0][row][causal[0][row] >= 5]
        length = len(symbols)
        assert batch[0][row, : length + 2].tolist() == [1, *symbols.tolist(), 2]
        assert (batch[0][row, length + 2 :] == 0).all()
        assert batch[1][row] == causal[1][row][causal[1][row] >= 0][-1] - 5
        if batch[2] is not None:
            assert batch[2][row].tolist() == [0] * (length + 2) + [-1] * (batch[0].shape[1] - length - 2)
    request = OpenRequest(3 * data.row_length, tmp_path)
    held_out = open_held_out(data, "labelled", request, "valid")
    assert held_out.batches is not None
    first = next(iter(held_out.batches))
    example = held_out.examples[0]
    encoded = opened.source.encode(example.source)
    assert first[0][0, 1 : len(encoded) + 1].tolist() == encoded
    assert example.target == str(int(first[1][0]))


def test_rules_without_a_last_answer_are_for_language_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.rule=mqar has no answer at the end of a row"):
        open_data(MQARData(symbols=64), "labelled", batch_tokens=640, cache=tmp_path, seed=0)
    data = StateTrackingData(group="S3", length=12, context=0.5)
    with pytest.raises(UserError, match=r"data\.context is for language models"):
        open_data(data, "labelled", batch_tokens=640, cache=tmp_path, seed=0)
