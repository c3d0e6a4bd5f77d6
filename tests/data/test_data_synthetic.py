"""Sequences made by a rule: as the rule says, the same from the same seeds, and new at every step."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyformer.base.errors import UserError
from manyformer.config import RunConfig, SyntheticData
from manyformer.config.data_sections import AdditionData, DuplicateData, HopsData, MarkovData
from manyformer.config.setting_layers import SettingLayer, overlay
from manyformer.config.validation_errors import validate
from manyformer.data import OpenedData, open_data
from manyformer.data.generated.synthetic import make_rule
from manyformer.data.generated.synthetic.sequence_rules import MarkovRule
from manyformer.nn.batches import IGNORE_INDEX


def opened(tmp_path: Path, *, batch: int = 640, seed: int = 0, **settings: Any) -> OpenedData:
    section = {"kind": "synthetic", "length": 32, "valid": 4096, **settings}
    data = RunConfig.model_validate({"recipe": "x", "data": section}).data
    return open_data(data, "next-token", batch_tokens=batch, cache=tmp_path, seed=seed)


def test_every_two_symbols_have_four_successors_with_their_chances() -> None:
    rule = MarkovRule(MarkovData(symbols=6, length=200))
    rows = rule.rows(np.random.default_rng(1), 2000)
    assert rows.symbols.shape == rows.targets.shape == (2000, 200)
    assert np.array_equal(rows.symbols[:, 1:], rows.targets[:, :-1])
    seen: dict[tuple[int, int], Counter[int]] = {}
    full = np.concatenate([rows.symbols, rows.targets[:, -1:]], axis=1)
    for a, b, c in zip(full[:, :-2].ravel(), full[:, 1:-1].ravel(), full[:, 2:].ravel()):
        seen.setdefault((int(a), int(b)), Counter())[int(c)] += 1
    assert len(seen) == 36
    for counts in seen.values():
        shares = sorted((n / counts.total() for n in counts.values()), reverse=True)
        if counts.total() > 2000:
            assert shares == pytest.approx(MarkovRule.PROBABILITIES, abs=0.04)
    assert rule.entropy == pytest.approx(-sum(p * math.log(p) for p in MarkovRule.PROBABILITIES))
    assert rule.entropy == pytest.approx(0.914, abs=5e-4)


def test_batches_are_of_the_model_s_kind(tmp_path: Path) -> None:
    data = opened(tmp_path)
    batch = next(data.train)
    assert batch[0].shape == (20, 32)
    assert data.required_keywords == {"vocab": 12 + 5}
    assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    assert int(batch[0].min()) >= 5
    assert int(batch[0].max()) < 17
    assert data.source.decode(batch[0][0]) == "".join(chr(ord("a") + int(t) - 5) for t in batch[0][0])
    assert "best loss 0.914 nats per symbol" in data.describe()[0]


def test_training_never_repeats_and_can_be_gone_on_with(tmp_path: Path) -> None:
    one, other, third = opened(tmp_path), opened(tmp_path), opened(tmp_path, seed=1)
    first, second = next(one.train), next(one.train)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(next(other.train)[0], first[0])
    assert not torch.equal(next(third.train)[0], first[0])
    other.train.load_state_dict(one.train.state_dict())
    assert torch.equal(next(other.train)[0], next(one.train)[0])
    with pytest.raises(UserError, match="the data differs from what this run was trained on"):
        opened(tmp_path, symbols=13).train.load_state_dict(one.train.state_dict())


def test_held_out_rows_are_the_same_for_every_run(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, seed=1)
    for a, b in zip(one.valid, other.valid, strict=True):
        assert torch.equal(a[0], b[0])
    assert one.test is not None
    assert not torch.equal(next(iter(one.valid))[0], next(iter(one.test))[0])
    assert sum(batch[0].numel() for batch in one.valid) == pytest.approx(4096, rel=0.1)


def test_longer_rows_are_fewer(tmp_path: Path) -> None:
    long = opened(tmp_path, length=128)
    assert sum(batch[0].numel() for batch in long.valid) == pytest.approx(4096, rel=0.1)
    assert long.valid.units is not None
    assert long.valid.units.targets == sum(int((batch[1] != IGNORE_INDEX).sum()) for batch in long.valid)


def test_the_context_of_held_out_rows_is_not_scored(tmp_path: Path) -> None:
    data = opened(tmp_path, context=0.5)
    for batch in data.valid:
        assert bool((batch[1][:, :16] == IGNORE_INDEX).all())
        assert bool((batch[1][:, 16:] != IGNORE_INDEX).all())
    assert bool((next(data.train)[1] != IGNORE_INDEX).all())


def test_a_batch_holds_a_row_at_least(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch.tokens is 20, less than one row of 32"):
        opened(tmp_path, batch=20)


def test_one_command_trains_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.inference.evaluate import evaluate
    from manyformer.training import silent, train

    monkeypatch.chdir(tmp_path)
    words = ["data.kind=synthetic", "dim=32", "depth=1", "heads=2", "limits.steps=3", "batch.tokens=512"]
    result = train("transformer-lm", [*words, "data.valid=2048"], on_event=silent)
    assert result.load().max_length == 64
    test, valid = evaluate(result.out), evaluate(result.out, split="valid")
    assert test.data == "test"
    assert valid["perplexity"].parts["nats"] == pytest.approx(result.scores["loss"], abs=1e-5)
    with pytest.raises(UserError, match="trained on generated data, not on files"):
        evaluate(result.out, data="x.txt")


def test_a_word_comes_twice_and_is_scored_once(tmp_path: Path) -> None:
    data = opened(tmp_path, rule="duplicate", symbols=9, length=16)
    batch = next(data.train)
    first, second = batch[0][:, :8], batch[0][:, 8:]
    assert torch.equal(first, second)
    assert bool((first[:, 0] == 5).all())
    assert set(first[:, 1:].unique().tolist()) == set(range(6, 14))
    assert bool((batch[1][:, :8] == IGNORE_INDEX).all())
    assert torch.equal(batch[1][:, 8:15], second[:, 1:])
    assert bool((batch[1][:, 15] == IGNORE_INDEX).all())
    assert "a word of 7 out of 8 symbols, repeated once" in data.describe()[0]
    with pytest.raises(ValueError, match="must be even"):
        DuplicateData(length=15)


def test_hops_lead_where_the_pointers_say() -> None:
    data = HopsData(symbols=5, hops=3, length=12)
    rows = make_rule(data).rows(np.random.default_rng(2), 40)
    for symbols, targets in zip(rows.symbols.tolist(), rows.targets.tolist()):
        points = dict(divmod(symbol, 5) for symbol in symbols[:5])
        assert sorted(points) == sorted(points.values()) == list(range(5))
        assert targets[:5] == [-1] * 5
        for question, answer in zip(symbols[5:], targets[5:]):
            hops, node = divmod(question - 25, 5)
            for _ in range(hops + 1):
                node = points[node]
            assert answer == node
    alike = make_rule(data.model_copy(update={"num_hops": 2})).rows(np.random.default_rng(2), 4)
    assert ((alike.symbols[:, 5:] - 25) // 5 == 1).all()


def test_sums_are_those_of_the_numbers() -> None:
    rows = make_rule(AdditionData(digits=9, length=20)).rows(np.random.default_rng(3), 200)
    for symbols, targets in zip(rows.symbols, rows.targets):
        scored = np.flatnonzero(targets >= 0)
        assert len(scored) == 9
        first, last = int(scored[0]), int(scored[-1])
        assert not symbols[:first].any()
        assert not symbols[last + 1 :].any()
        weights = 2 ** np.arange(9)
        one, other = ((symbols[first : last + 1] >> shift) & 1 for shift in (1, 0))
        total = int(one @ weights + other @ weights)
        assert [(total >> place) & 1 for place in range(9)] == targets[first : last + 1].tolist()
    with pytest.raises(ValueError, match="less than or equal to 4"):
        AdditionData(symbols=12)
    with pytest.raises(ValueError, match=r"must be at most data\.length"):
        AdditionData(digits=70)
    with pytest.raises(ValueError, match=r"must be above data\.symbols"):
        HopsData(length=12)
    with pytest.raises(ValueError, match=r"must be at most data\.hops"):
        HopsData(num_hops=4)


def test_the_letters_of_a_rule_are_its_symbols(tmp_path: Path) -> None:
    assert opened(tmp_path, rule="hops", symbols=4, hops=2).required_keywords == {"vocab": 4 * 4 + 2 * 4 + 5}


def problems(**data: Any) -> list[str]:
    section = {"kind": "synthetic", **data}
    return [str(error) for error in validate(SettingLayer({"recipe": "x", "data": section}), None)[1]]


def test_a_setting_of_another_rule_is_refused_in_a_sentence() -> None:
    assert problems(rule="markov", period=3) == ["data.period: is a setting of data.rule=periodic, not of markov"]
    assert problems(period=3) == ["data.period: is a setting of data.rule=periodic, not of markov"]
    assert problems(rule="mqar", pairz=3) == ["data.pairz: no such setting; did you mean data.pairs?"]
    (problem,) = problems(rule="mqra", pairs=3)
    assert problem.startswith("data.rule: 'mqra' is not one of markov, periodic,")
    assert problem.endswith("did you mean mqar?")
    assert len(problems(rule=["mqar"])) == len(problems(rule=3)) == 1


def test_a_run_that_was_saved_when_rules_shared_their_settings_is_read() -> None:
    joint = {"symbols": 17, "period": 24, "hops": 3, "num_hops": None, "digits": 16, "rows_per_sequence": 4}
    data = RunConfig.model_validate({"recipe": "x", "data": {"kind": "synthetic", "rule": "marked", **joint}}).data
    assert data.model_dump()["symbols"] == 17
    assert "period" not in data.model_dump()
    assert problems(rule="marked", period=24) == ["data.period: is a setting of data.rule=periodic, not of marked"]


def test_another_rule_drops_the_settings_of_the_first() -> None:
    lower = SettingLayer({"data": {"kind": "synthetic", "rule": "hops", "hops": 2, "length": 20}})
    upper = SettingLayer({"data": {"rule": "periodic"}})
    assert overlay(lower, upper).data["data"] == {"kind": "synthetic", "rule": "periodic"}
    again = SettingLayer({"data": {"rule": "hops", "num_hops": 1}})
    assert overlay(lower, again).data["data"] == {**lower.data["data"], "num_hops": 1}


@pytest.mark.parametrize("name", SyntheticData.variants)
def test_batches_depend_on_their_number_alone(name: str, tmp_path: Path) -> None:
    """As a worker, a rank and a resumed run make them."""
    small = {"listops": {"min_tokens": 10, "depth": 4}, "pathfinder": {"size": 16, "length": 256, "dashes": 3}}
    settings = {"length": 64, **small.get(name, {})}
    first, resumed = (opened(tmp_path, rule=name, **settings) for _ in range(2))
    for _ in range(3):
        next(first.train)
    resumed.train.load_state_dict(first.train.state_dict())
    ranks = [resumed.train.shard(rank, 2) for rank in range(2)]
    batch, parts = next(first.train), [next(rank) for rank in ranks]
    assert torch.equal(next(resumed.train)[0], batch[0])
    for part, rank in zip(parts, range(2)):
        assert torch.equal(part[0], batch[0][rank::2])
        assert torch.equal(part[1], batch[1][rank::2])
    assert int(batch[0].max()) < first.required_keywords["vocab"]
    assert int(batch[1].max()) < first.required_keywords["vocab"]
    assert batch.target_count() > 0


def test_inputs_are_predicted_in_pretraining() -> None:
    answers, inputs = (
        make_rule(DuplicateData(symbols=5, length=8, targets=targets)).rows(np.random.default_rng(3), 4)
        for targets in ("rule", "inputs")
    )
    assert (answers.symbols == inputs.symbols).all()
    assert (inputs.targets[:, :-1] == inputs.symbols[:, 1:]).all()
    assert (inputs.targets[:, -1] < 0).all()


def test_a_row_matches_where_none_of_its_answers_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.inference.evaluate import evaluate
    from manyformer.training import silent, train

    monkeypatch.chdir(tmp_path)
    words = ["data.kind=synthetic", "data.rule=copy", "data.symbols=2", "data.length=5", "data.valid=500"]
    model = ["dim=16", "depth=1", "heads=2", "limits.steps=40", "batch.tokens=320", "optim.lr=0.01"]
    result = train("transformer-lm", [*words, *model], on_event=silent)
    trained, matches, rows = result.load(), 0, 0
    data = opened(tmp_path, batch=320, rule="copy", symbols=2, length=5, valid=500)
    assert data.test is not None
    for batch in data.test:
        predicted = trained(batch[0]).logits.argmax(-1)
        for answers, targets in zip(predicted.tolist(), batch[1].tolist()):
            matches += all(answer == target for answer, target in zip(answers, targets) if target != IGNORE_INDEX)
            rows += 1
    score = evaluate(result.out)["exact match"]
    assert score.value == pytest.approx(100 * matches / rows)
    assert score.signature.startswith(f"per:row|rows:{rows}")
