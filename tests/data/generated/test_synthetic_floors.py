"""Floors of generated tasks: published and exact ones, and the command that prints them."""

import json
from pathlib import Path

import pytest

from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.config.data_sections import (
    CopyData,
    DuplicateData,
    ListOpsData,
    MADMemorizationData,
    MarkovData,
    NeedleData,
    StateTrackingData,
)
from manyformer.config.section import ConfigSection
from manyformer.data.generated.synthetic_floors import TaskFloor, measure_floors


def floors_of(data: ConfigSection, examples: int) -> dict[str, TaskFloor]:
    return {floor.name: floor for floor in measure_floors(data, examples)}  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_floors_of_listops_are_those_of_the_long_range_arena() -> None:
    """Local attention, Linear Transformer, Sparse and Performer have 16 to 18 there; BigBird, the Transformer,
    Synthesizer and Reformer 36 to 37.3 (Tay et al. 2021, table 1); the further levels were measured once."""
    floors = floors_of(ListOpsData(), 10_000)
    assert floors["majority"].accuracy == pytest.approx(16.6, abs=2.0)
    assert floors["root operator"].accuracy == pytest.approx(36.6, abs=2.0)
    assert floors["root operator, digits under it"].accuracy == pytest.approx(48.7, abs=2.1)
    assert floors["root operator, digits and operators under it"].accuracy == pytest.approx(51.8, abs=2.1)
    assert floors["root operator"].targets == 5_000


def test_shortcuts_of_short_expressions_are_ordered() -> None:
    floors = floors_of(ListOpsData(length=80, min_tokens=10, depth=5, max_args=5), 3_000)
    assert floors["chance"].accuracy == pytest.approx(10)
    assert floors["majority"].accuracy < floors["root operator"].accuracy - 5
    assert floors["root operator"].accuracy < floors["root operator, digits under it"].accuracy - 5


def test_a_chain_of_order_two_is_known_from_two_symbols() -> None:
    floors = floors_of(MarkovData(symbols=6), 400)
    assert floors["last 2 symbols"].accuracy == pytest.approx(70, abs=1.5)
    assert floors["last symbol"].accuracy < 50
    assert floors["chance"].accuracy == pytest.approx(100 / 6)


def test_parity_is_at_chance_whatever_is_counted() -> None:
    floors = floors_of(StateTrackingData(length=40, scored="last"), 2_000)
    for name in ("majority", "last symbol", "last 3 symbols", "nearest neighbour"):
        assert floors[name].accuracy == pytest.approx(50, abs=4.5), name


def test_what_is_learnt_by_heart_is_known_from_the_key() -> None:
    floors = floors_of(MADMemorizationData(symbols=21), 400)
    assert floors["last 2 symbols"].accuracy == 100
    assert floors["last symbol"].accuracy < 25


def test_a_needle_is_the_last_follower_of_its_key() -> None:
    assert floors_of(NeedleData(length=30), 400)["last follower in the row"].accuracy == 100
    # where all symbols differ, the copy of a string is the last follower but at its first and last symbol
    floors = floors_of(DuplicateData(symbols=4000, length=12), 400)
    assert floors["last follower in the row"].accuracy == pytest.approx(100, abs=1)
    assert floors_of(CopyData(symbols=2, order="sorted"), 400)["last symbol"].accuracy > 70


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(UserError, match="at least 4 examples, got 3"):
        measure_floors(MarkovData(), 3)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["floors", "mqar", "symbols=64", "pairs=2", "--length=16", "--examples", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mqar: accuracy of guesses in %, on 40 targets")
    assert "last follower in the row" in out
    assert run(["floors", "needle", "--json", "--examples", "40"]) == 0
    assert {floor["name"] for floor in json.loads(capsys.readouterr().out)} >= {"chance", "majority"}
    assert run(["floors"]) == 0
    assert "listops" in capsys.readouterr().out
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: transformer-lm\ndata: {kind: synthetic, rule: copy, length: 9}\n")
    assert run(["floors", str(file), "data.symbols=5", "--examples=40"]) == 0
    assert capsys.readouterr().out.startswith("copy:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mqra"], "there is no rule, run file or shipped run 'mqra'; did you mean mqar?"),
        (["mqar", "period=3"], "is a setting of data.rule=periodic, not of mqar"),
        (["mqar", "pairz=3"], "did you mean data.pairs?"),
        (["lm/stdlib"], "learns from data of kind text; baselines are those of generated data"),
        (["pairs=3"], "baselines need the rule or the run that pairs=3 is a setting of"),
        (["mqar", "--examples", "3"], "Input should be greater than or equal to 4"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["floors", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
