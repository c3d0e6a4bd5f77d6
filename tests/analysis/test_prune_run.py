"""From a trained run to a pruned one: which heads go first, the curve, and a run that is scored and trained on."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.pruning import (
    CURVE_FILE,
    CURVE_PICTURE,
    GateRanking,
    HeadRanking,
    HeadUnit,
    ImportanceRanking,
    PruningResult,
    QualityCurve,
    RemovableHeads,
    count_heads,
    gate_training,
    prune_run,
)
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.inference.evaluate import evaluate
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.nn.attention.head_gates import add_heads, attention_heads, gated_heads, parse_heads, subtract_heads
from manyformer.training import silent

TINY: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 4, "ff_dim": 24, "dropout": 0.0}
GATES = GateRanking(penalty=0.1, learning_rate=1e-3, steps=3, on_event=silent)


def settings(folder: Path, **changes: Any) -> RunConfig:
    data = {"kind": "pairs", "path": str(folder / "pairs.tsv"), "tokenizer": "char", "valid": 0.2}
    values = {
        "recipe": "transformer", "model": TINY, "data": data, "limits": {"steps": 5}, "batch": {"tokens": 512},
        "evaluate": {"every": None}, "device": "cpu", "out": str(folder / "full"), **changes,
    }  # fmt: skip
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruning")
    rows = "".join(f"{n} {n + 1}\t{n + 1} {n}\n" for n in range(300))
    (folder / "pairs.tsv").write_text("source\ttarget\n" + rows)
    return mf.train(settings(folder), on_event=silent).out


def pruned(run: Path, out: Path, ranking: HeadRanking, **options: Any) -> PruningResult:
    return prune_run(run, ranking, keep=3, part="encoder", out=out, device="cpu", **options)


@pytest.mark.parametrize("ranking", [ImportanceRanking(), GATES], ids=lambda ranking: ranking.name)
def test_a_pruned_run_is_a_run(run: Path, tmp_path: Path, ranking: HeadRanking) -> None:
    result = pruned(run, tmp_path / "three", ranking)
    model = mf.load(tmp_path / "three")
    heads = [layer.heads for name, layer in attention_heads(model).items() if name.startswith("encoder")]
    assert sum(heads) == 3
    assert [layer.heads for name, layer in attention_heads(model).items() if name.startswith("decoder")] == [4] * 4
    curve = QualityCurve.read(tmp_path / "three" / CURVE_FILE)
    assert [point.heads for point in curve.points] == [8, 7, 6, 5, 4, 3]
    assert parse_heads(curve.points[-1].removed) == result.removed
    assert (tmp_path / "three" / CURVE_PICTURE).exists()
    # the last point was measured with gates at 0, the run is scored without the heads
    loss = evaluate(tmp_path / "three", split="valid", device="cpu")
    assert loss["BLEU"].value >= 0
    trained = mf.train(tmp_path / "three" / "run.yaml", ["limits.steps=1", "limits.minutes=null"], on_event=silent)
    assert trained.load().spec == model.spec


def test_the_scores_of_the_curve_are_those_of_the_pruned_model(run: Path, tmp_path: Path) -> None:
    result = pruned(run, tmp_path / "three", ImportanceRanking())
    file = tmp_path / "three" / "run.yaml"
    frozen = ["optim.lr=1e-30", "limits.steps=1", "limits.minutes=null", f"out={tmp_path / 'same'}"]
    scores = mf.train(file, frozen, on_event=silent).scores
    assert scores["loss"] == pytest.approx(result.curve.points[-1].scores["loss"], rel=1e-5)


def test_gates_train_the_part_alone(run: Path, tmp_path: Path) -> None:
    pruned(run, tmp_path / "three", GATES)
    before, after = mf.load(run).state_dict(), mf.load(tmp_path / "three" / "gates").state_dict()
    assert before.keys() == after.keys()
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"encoder"} | ({"encoder_embed"} & changed)
    config = settings(run.parent, init_from=str(run), frozen=["decoderr"], out=str(tmp_path / "x"))
    with pytest.raises(UserError, match="has no part 'decoderr'; did you mean decoder"):
        mf.train(config, on_event=silent)


def test_an_interrupted_pruning_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the files of the pruned run, and after the training of gates, which is not repeated."""
    out = tmp_path / "three"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # the package has a function of the module's name
    prune_module = sys.modules["manyformer.analysis.pruning"]
    written = []
    for place, name in ((prune_module, "write_pruned_run"), (QualityCurve, "write"), (QualityCurve, "draw")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                pruned(run, out, GATES)
        written.append((out / "gates" / "gates.json").stat().st_mtime_ns)
    with pytest.raises(UserError, match=r"three is the unfinished output of 'prune .* gates', not of '.* importance'"):
        pruned(run, out, ImportanceRanking())
    pruned(run, out, GATES)
    assert len({*written, (out / "gates" / "gates.json").stat().st_mtime_ns}) == 1
    assert {path.name for path in out.iterdir()} == {"model", "run.yaml", CURVE_FILE, CURVE_PICTURE, "gates"}
    for ranking in (GATES, ImportanceRanking()):
        with pytest.raises(UserError, match="three exists already; choose another --out"):
            pruned(run, out, ranking)
    # pruned again, with the steps that a run without training of its own cannot tell
    six = prune_run(tmp_path / "three", GATES, keep=8, part="decoder", out=tmp_path / "six", device="cpu")
    assert len(parse_heads(six.model.spec.keywords["removed_heads"])) > len(six.removed)
    with pytest.raises(UserError, match="so the number of steps for gates must be given"):
        gate_training(open_run(tmp_path / "three"), replace(GATES, steps=None), None, tmp_path / "x")


def test_gates_refuse_settings_that_contradict_them() -> None:
    with pytest.raises(ValueError, match=r"must be 0 with loss\.gate_penalty"):
        RunConfig.model_validate({"recipe": "transformer", "loss": {"gate_penalty": 0.1}})
    with pytest.raises(ValueError, match="without it there are no gates"):
        RunConfig.model_validate({"recipe": "transformer", "loss": {"gated_part": "encoder"}})
    with pytest.raises(ValueError, match="needs init_from"):
        RunConfig.model_validate({"recipe": "transformer", "frozen": ["decoder"]})


@pytest.mark.parametrize(
    ("keep", "part", "message"),
    [
        (8, "encoder", "8 heads cannot be kept of 8 in encoder: the number must be from 0 to 7"),
        (24, None, "24 heads cannot be kept of 24: the number must be from 0 to 23"),
        (3, "body", "there is no part 'body' with attention heads"),
    ],
)
def test_impossible_numbers_of_heads_are_refused(run: Path, tmp_path: Path, keep: int, part: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prune_run(run, ImportanceRanking(), keep=keep, part=part, out=tmp_path / "x", device="cpu")
    assert not (tmp_path / "x").exists()


def test_units_go_by_importance_and_whole() -> None:
    units = tuple(HeadUnit(name, heads) for name in "ab" for heads in ((0, 1), (2, 3)))
    importance = {"a": torch.tensor([1.0, 1, 4, 4]), "b": torch.tensor([2.0, 4, 0, 1])}
    removable = RemovableHeads(units, frozenset("b"))
    assert removable.minimum == 2
    first = removable.least_important(importance, (), keep=2, step=1)
    assert first == [HeadUnit("b", (2, 3))]
    assert removable.least_important(importance, first, keep=2, step=9) == [units[0], units[1]]
    assert removable.least_important(importance, first, keep=5, step=9) == []
    assert count_heads(units) == 8


def test_heads_are_numbered_as_the_recipe_numbers_them(run: Path) -> None:
    """Pruned twice is pruned once: the second numbers are those of the first result."""
    model, name = mf.load(run), "encoder.0.attention"
    twice = mf.prune_heads(mf.prune_heads(model, {name: [0, 2]}), {name: [1], "decoder.1.cross": [3]})
    assert twice.spec.keywords["removed_heads"] == "encoder.0.attention:0,2,3 decoder.1.cross:3"
    once = mf.prune_heads(model, {name: [0, 2, 3], "decoder.1.cross": [3]})
    assert once.spec == twice.spec
    for first, second in zip(once.parameters(), twice.parameters(), strict=True):
        assert torch.equal(first, second)
    assert model.spec.keywords["removed_heads"] is None
    with gated_heads(model, {name: torch.ones(4)}):
        pass


def test_numbers_of_heads_add_and_subtract() -> None:
    earlier, total = {"a": (0, 2)}, {"a": (0, 1, 2, 5), "b": (3,)}
    removed = subtract_heads(total, earlier)
    assert removed == {"a": (0, 3), "b": (3,)}
    assert add_heads(earlier, removed) == total
    with pytest.raises(UserError, match="a has no head 2 any more: it was removed earlier"):
        subtract_heads({"a": (0,)}, earlier)
