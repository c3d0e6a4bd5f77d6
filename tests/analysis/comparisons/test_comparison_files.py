"""The files of comparisons: what they mean, and a sentence with its place for every mistake."""

from pathlib import Path

import pytest
import yaml

from manyformer.analysis.comparisons.compare import read_comparison
from manyformer.analysis.comparisons.sizing import TOLERANCE, body_parameters
from manyformer.analysis.comparisons.suite_runner import read_suite
from manyformer.base.errors import UserErrors
from manyformer.config import shipped_comparisons, shipped_runs
from manyformer.config.run_file import read_mapping
from manyformer.config.setting_layers import SettingError
from manyformer.config.suite import is_suite
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.recipes import RECIPES

FILE = """# Which position is best?
# In two lines.
title: Positions
seeds: 2
score: [loss, accuracy]
run:
  recipe: compose
  model: {dim: 16, depth: 1, heads: 2}
  data: {kind: synthetic, length: 16}
  limits: {steps: 3}
cases:
  learned: {model: {position: learned}}
  rope:
    model:
      position: rope
  yarn: {trained: rope, model: {position: rope-yarn, length_scale: 2.0}}
  lm: {recipe: transformer-lm}
sweep: {data.length: [16, 32]}
claims: [rope@16 <= learned@16 + 0.1]
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


def test_cases_are_runs_over_the_base(tmp_path: Path) -> None:
    actual = read_comparison(written(tmp_path, FILE), ["limits.steps=7", "depth=2"])
    assert (actual.name, actual.about) == ("mine", "Which position is best? In two lines.")
    assert (actual.setting, actual.values) == ("data.length", (16, 32))
    assert [case.name for case in actual.cases] == ["learned", "rope", "yarn", "lm"]
    for case in actual.cases:
        assert case.run.limits.steps == 7
        assert case.run.model["dim"] == 16
        assert case.run.model["depth"] == 2
        assert [point.data.length for point in case.points] == [16, 32]  # type: ignore[union-attr]
    assert actual.case("rope").run.model["position"] == "rope"
    assert actual.case("lm").run.recipe == "transformer-lm"
    assert (actual.case("yarn").trained_by, actual.case("yarn").run.model["length_scale"]) == ("rope", 2.0)


def test_the_sweep_wins_over_the_command_line(tmp_path: Path) -> None:
    actual = read_comparison(written(tmp_path, FILE), ["data.length=20"])
    assert actual.case("rope").run.data.length == 20  # type: ignore[union-attr]
    assert [point.data.length for point in actual.case("rope").points] == [16, 32]  # type: ignore[union-attr]


def test_a_sweep_over_a_keyword_leaves_out_who_has_none(tmp_path: Path) -> None:
    actual = read_comparison(
        written(
            tmp_path, FILE.replace("data.length: [16, 32]", "model.length_scale: [1.0, 2.0]").replace("@16", "@1.0")
        )
    )
    assert actual.case("lm").points == (None, None)
    assert [point.model["length_scale"] for point in actual.case("rope").points if point is not None] == [1.0, 2.0]


def test_one_base_serves_recipes_with_other_keywords(tmp_path: Path) -> None:
    text = (
        "title: T\nrun: {model: {dim: 16, heads: 2, kv_heads: 1, norm_kind: rms}}\n"
        "cases:\n  a: {recipe: compose}\n  b: {recipe: transformer-lm}\n"
    )
    actual = read_comparison(written(tmp_path, text))
    assert actual.case("a").run.model == {"dim": 16, "heads": 2, "kv_heads": 1, "norm_kind": "rms"}
    assert actual.case("b").run.model == {"dim": 16, "heads": 2, "kv_heads": 1}
    assert refused(tmp_path, text.replace("norm_kind", "norm_knid")) == [
        "mine.yaml:2:47: model.norm_knid: no such setting in the recipe of any case"
    ]


def test_a_base_may_extend_a_shipped_run(tmp_path: Path) -> None:
    text = "title: T\nrun: {extends: lm/stdlib, limits: {steps: 9}}\ncases:\n  a: {}\n  b: {model: {depth: 2}}\n"
    actual = read_comparison(written(tmp_path, text))
    assert [case.run.model["depth"] for case in actual.cases] == [4, 2]
    assert actual.cases[0].run.limits.steps == 9
    assert actual.cases[0].run.limits.minutes == 3
    assert actual.values == (None,)


LARGE = {"suite/full", "suite/characters"}
"""Suites of so many models that solving for their sizes takes seconds; `suite/quick` is read in the same way."""
SMALL = sorted(shipped_comparisons().keys() - LARGE, key=lambda name: (name != "suite/quick", name))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(LARGE))])
def test_shipped_ones_are_valid_and_no_runs(name: str) -> None:
    actual = read_suite(name) if is_suite(name) else read_comparison(name)
    assert actual.about
    assert name not in shipped_runs()
    assert f"comparisons/{name}" not in shipped_runs()


def test_no_shipped_file_has_a_setting_twice() -> None:
    errors: list[SettingError] = []
    for file in shipped_comparisons().values():
        read_mapping(file, "a comparison has cases", "`cases: {llama: {}}`", errors)
    assert errors == []


def test_every_causal_language_model_has_the_budget_of_nanogpt() -> None:
    cases = yaml.safe_load(shipped_comparisons()["suite/characters"].read_text(encoding="utf-8"))["cases"]
    causal = {name for name, recipe in RECIPES.items() if recipe.card.task is LANGUAGE_MODELLING}
    causal = {name for name in causal if "causal" in RECIPES[name].card.promises}
    assert {settings.get("recipe", name) for name, settings in cases.items()} == causal


def test_larger_models_are_trained_as_the_small_ones_that_they_are_compared_with() -> None:
    files = (shipped_comparisons()[f"suite/better-training{suffix}"] for suffix in ("", "-larger"))
    small, large = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)
    assert small.pop("title") != large.pop("title")
    assert small["run"].pop("model") == {"dim": 64, "depth": 2, "heads": 2, "dropout": 0.0}
    assert large["run"].pop("model") == {"dim": 192, "depth": 3, "heads": 4, "dropout": 0.0}
    assert small == large


PAPERS = [
    *("translation/kernels", "translation/fixed-vector", "content/sinkhorn", "content/duplication", "content/routing"),
    *("kernels/from-softmax", "kernels/pairs", "kernels/projected-length", "depth/span-cache", "memory/carried-sums"),
    *("answers/global-questions", "mixers/language", "mixers/patches", "baseline/2026"),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", PAPERS)
def test_what_papers_claim_is_compared_in_one_frame(name: str) -> None:
    """Equal parameters, as many learning rates for every case, three seeds."""
    actual = read_comparison(name)
    reference = actual.file.reference
    assert reference is not None
    first = actual.case(reference).run
    parameters = body_parameters(first)
    for case in actual.cases:
        # one that starts from the weights of another case may have more positions
        shared = {"max_length"} & case.run.model.keys() & first.model.keys()
        run = case.run.model_copy(update={"model": case.run.model | {name: first.model[name] for name in shared}})
        assert body_parameters(run) == pytest.approx(parameters, rel=TOLERANCE)
    assert list(actual.file.trials) == ["optim.lr"]
    # the best rates of parts that change the scale of a model lie further apart
    assert {len(case.trials) for case in actual.cases} == {5 if name == "baseline/2026" else 3}
    assert actual.file.seeds == 3


def test_all_trials_are_cases_of_their_own_with_the_weights_of_the_same_trial(tmp_path: Path) -> None:
    text = FILE.replace("claims: [rope@16 <= learned@16 + 0.1]\n", "trials: {optim.lr: [0.001, 0.01]}\nselect: all\n")
    actual = read_comparison(written(tmp_path, text))
    assert [case.name for case in actual.cases] == [
        f"{name}, optim.lr {rate}" for name in ("learned", "rope", "yarn", "lm") for rate in ("0.001", "0.01")
    ]
    assert actual.case("yarn, optim.lr 0.01").trained_by == "rope, optim.lr 0.01"


def test_a_case_may_have_trials_of_its_own(tmp_path: Path) -> None:
    own = "  rope:\n    trials: {optim.lr: [0.1, 0.2, 0.3]}\n"
    text = FILE.replace("score: [loss", "trials: {optim.lr: [0.001, 0.01]}\nscore: [loss").replace("  rope:\n", own)
    rates = {
        case.name: [trial.run.optim.lr for trial in case.trials]
        for case in read_comparison(written(tmp_path, text)).cases
    }
    # a case with the weights of another has its trials
    assert rates["rope"] == rates["yarn"] == [0.1, 0.2, 0.3]
    assert rates["learned"] == rates["lm"] == [0.001, 0.01]
    for wrong in ("[0.1]", "{optim.lr: 0.1}", "{optim.lr: []}"):
        (message,) = refused(tmp_path, text.replace("{optim.lr: [0.1, 0.2, 0.3]}", wrong))
        assert "rope.trials: must be settings with a list of values each, not " in message


@pytest.mark.parametrize("name", ["optimizers/characters", "optimizers/stdlib"])
def test_optimizers_have_as_many_rates_each(name: str) -> None:
    comparison = read_comparison(name, ["data.path=text.txt"])
    assert {len(case.trials) for case in comparison.cases} == {4}
    assert {case.run.optim.name for case in comparison.cases} == {"adamw", "muon"}
    # all else is equal
    runs = [
        case.run.model_copy(update={"optim": comparison.cases[0].run.optim, "out": None}) for case in comparison.cases
    ]
    assert len({run.model_dump_json() for run in runs}) == 1
    assert comparison.file.seeds == 3


def test_models_become_as_large_as_the_reference(tmp_path: Path) -> None:
    text = (
        "title: T\nreference: lm\nrun: {recipe: transformer-lm, model: {dim: 64, depth: 1, heads: 2, max_length: 64}}\n"
        "cases:\n  lm: {}\n  synthesizer: {recipe: synthesizer}\n"
    )
    actual = read_comparison(written(tmp_path, text))
    assert "ff_dim" not in actual.case("lm").run.model
    # two scores of its table for each of 64 x 64 pairs of positions, and two that mix it with products
    removed = 2 * 64 * 64 // (2 * 64 + 1)
    assert actual.case("synthesizer").run.model["ff_dim"] == pytest.approx(4 * 64 - removed, abs=2)
    longer = "  longer: {recipe: synthesizer, init_from: long, data: {length: 32}}\n"
    longer += "  long: {recipe: synthesizer, init_from: synthesizer, model: {max_length: 128}}\n"
    cases = read_comparison(written(tmp_path, text + longer)).cases
    sizes = {case.name: case.run.model.get("ff_dim") for case in cases}
    assert sizes["longer"] == sizes["long"] == sizes["synthesizer"]
    with pytest.raises(ValueError, match=r"case synthesizer: it has 9,594 parameters .* lm has 1,400, and no value of"):
        read_comparison(written(tmp_path, text.replace("dim: 64", "dim: 8", 1)))
    assert refused(tmp_path, text.replace("reference: lm", "reference: synthesiser")) == [
        "reference: there is no case 'synthesiser'; did you mean synthesizer?"
    ]


def refused(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        read_comparison(written(tmp_path, text), overrides)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.lines]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("position: learned", "position: lerned", "mine.yaml:12:21: model.position: 'lerned' is not one of"),
        ("heads: 2", "haeds: 2", "mine.yaml:8:30: model.haeds: no such setting; did you mean model.heads?"),
        ("title: Positions", "titel: Positions", "mine.yaml:1:1: title: is missing: What is compared, in one line"),
        ("title: Positions", "titel: Positions", "mine.yaml:3:1: titel: no such setting; did you mean title?"),
        ("seeds: 2", "seeds: 0", "mine.yaml:4:1: seeds: must be greater than 0, got 0"),
        (
            "trained: rope",
            "trained: roep",
            "mine.yaml:16:10: yarn.trained: must be another case that is trained itself",
        ),
        ("trained: rope", "trained: yarn", "must be another case that is trained itself, not 'yarn'"),
        (
            "trained: rope,",
            "trained: rope, seed: 3,",
            "case yarn: it takes the weights of rope, so nothing but its model",
        ),
        (
            "lm: {recipe",
            "lm: {init_from: lm, recipe",
            "case lm: init_from: lm must be a case that is trained itself, and before",
        ),
        (
            "lm: {recipe",
            "lm: {init_from: yarn, recipe",
            "case lm: init_from: yarn must be a case that is trained itself",
        ),
        (
            "data.length: [16, 32]",
            "optim.lr: [1, 2]",
            "mine.yaml:18:1: sweep: 'optim.lr' cannot be changed after training; model.KEYWORD and data.length,",
        ),
        (
            "data.length: [16, 32]",
            "model.stretch: [1, 2]",
            "mine.yaml:18:9: model.stretch: no such setting in the recipe of any case",
        ),
        ("data.length: [16, 32]", "data.length: [0]", "--data.length 0: must be greater than 0, got 0"),
        ("score: [loss, accuracy]", "score: los", "there is no score 'los'; did you mean loss?"),
        (
            "score: [loss, accuracy]",
            "score: bleu",
            "compose (language-model) has no score 'bleu'; it has loss, accuracy",
        ),
        ("heads: 2", "heads: 3", "case learned: dim (16) must be a multiple of heads (3)"),
        ("rope@16 <=", "roep@16 <=", "there is no case 'roep'; did you mean rope?"),
        ("rope@16 <=", "rope@17 <=", "the sweep has no value 17"),
        ("rope@16 <=", "rope <=", "write rope@16, for one value of the sweep"),
        ("rope@16 <= learned@16 + 0.1", "rope is better", "claims: 'rope is better' is no claim; write CASE@VALUE"),
        ("recipe: compose", "recipe: componse", "mine.yaml:7:3: recipe: there is no recipe 'componse'"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    lines = refused(tmp_path, FILE.replace(old, new, 1))
    assert any(message in line for line in lines), lines
    assert len(lines) == len(set(lines))


def test_mistakes_on_the_command_line_are_told_once(tmp_path: Path) -> None:
    lines = refused(tmp_path, FILE, "limits.stpes=3")
    assert lines == ["--limits.stpes 3: no such setting; did you mean limits.steps?"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.yaml:1:1: is empty; a comparison has a base run and cases, as `run:` and `cases:`"),
        ("title: T\n", "cases: is missing: name at least one case"),
        ("title: T\ncases: [a]\n", "mine.yaml:2:1: cases: must be a mapping, not ['a']"),
        ("title: T\ncases: {a: 3}\n", "cases.a: must be a mapping of settings that differ from the run's, not 3"),
        (
            "title: T\nrun: {extends: lm/stdlb}\ncases: {a: }\n",
            "run.extends: there is no shipped run and no file 'lm/stdlb'",
        ),
    ],
)
def test_what_is_no_comparison(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in line for line in refused(tmp_path, text))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="no comparison and no file 'positions/extrapolaton'; did you mean positions/extra"
    ):
        read_comparison("positions/extrapolaton")
