"""The gallery of leaks: in each file of examples/leaks the checker finds the fault, and nothing in its sound twin."""

import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS, Adapter
from manyformer.analysis.contracts.evaluators import check_evaluator
from manyformer.analysis.contracts.scorers import check_scorer
from manyformer.cli import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/leaks"
LENGTH = 40
"""Of all sequences: the cases have blocks of 8, and a check at its usual lengths takes a second or more."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"leaks_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = {path.stem: load(path) for path in sorted(FOLDER.glob("*.py"))}
MODELS = [name for name, case in CASES.items() if hasattr(case, "Faulty")]
SCORERS = [name for name, case in CASES.items() if hasattr(case, "faulty") and case.FAILS != "counted"]
ODD = [name for name, case in CASES.items() if hasattr(case, "LOOKS_LIKE")]

LEAKS = ("causal", "causal-training", "causal-gradient", "batch", "batch-training")


def failures(model: nn.Module | Adapter, only: Collection[str]) -> set[str]:
    return {row.contract for row in mf.check(model, only=only, length=LENGTH).failed}


def build(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(CASES[name], kind)()
    return model


def score_failures(score: Any, vocab: int, **options: Any) -> set[str]:
    return {row.contract for row in check_scorer(score, vocab, length=24, **options).failed}


def test_every_case_is_one_of_a_known_kind() -> None:
    others = {name for name in CASES if name not in (*MODELS, *SCORERS, *ODD)}
    assert others == {"replacement_bytes", "strided_tail", "honest_windows"}
    assert {CASES[name].FAILS for name in MODELS} <= set(CONTRACTS)


@pytest.mark.parametrize("name", MODELS)
def test_the_leak_of_a_model_is_missed(name: str) -> None:
    contract = CASES[name].FAILS
    assert failures(build(name, "Faulty"), only={contract}) == {contract}


@pytest.mark.parametrize("name", MODELS)
def test_the_sound_twin_of_a_model_is_accused(name: str) -> None:
    contracts = {CASES[name].FAILS, *LEAKS}
    assert failures(build(name, "Sound"), only=contracts) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_sound_twin_breaks_another_contract(name: str) -> None:
    assert mf.check(build(name, "Sound"), skip=["compile"]).failed == ()


@pytest.mark.parametrize("name", SCORERS)
def test_the_leak_of_a_scorer_is_missed(name: str) -> None:
    case = CASES[name]
    assert score_failures(case.faulty, case.VOCAB, only=[case.FAILS]) == {case.FAILS}
    assert score_failures(case.sound, case.VOCAB) == set()


def test_bytes_that_a_text_does_not_have_are_missed() -> None:
    case = CASES["replacement_bytes"]
    options = {"decode": case.decode, "encode": case.encode, "only": ["bytes"]}
    assert score_failures(case.score, case.VOCAB, bytes_of=case.faulty_bytes, **options) == {"bytes"}
    assert score_failures(case.score, case.VOCAB, bytes_of=case.sound_bytes, **options) == set()


def test_a_tail_that_is_counted_repeatedly_is_missed() -> None:
    case = CASES["strided_tail"]
    assert check_evaluator(case.faulty, case.VOCAB).verdict == "failed"
    assert check_evaluator(case.sound, case.VOCAB).verdict == "passed"


def test_windows_aligned_to_the_end_of_a_text_are_accused() -> None:
    case = CASES["honest_windows"]
    assert score_failures(case.honest, case.VOCAB) == set()


@pytest.mark.parametrize("name", ODD)
def test_an_honest_model_that_looks_wrong_is_accused_once_it_is_described(name: str) -> None:
    case = CASES[name]
    contract = case.LOOKS_LIKE
    assert failures(build(name, "Model"), only={contract}) == {contract}
    if hasattr(case, "honest"):
        torch.manual_seed(0)
        assert failures(case.honest(), only=LEAKS) == set()
    else:
        assert failures(build(name, "Model"), only=set(LEAKS) - {contract}) == set()


def test_the_page_finds_another_place_than_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/honest.md").read_text()
    (code, *_) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^  (model\.py:\d+: .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(code)
    assert run(["check", "model.py:GPT", "--only", "causal", "--length", "16"]) == 1
    assert shown in capsys.readouterr().out
    (tmp_path / "sound.py").write_text(code.replace(".tril()", ".tril().bool()"))
    assert run(["check", "sound.py:GPT", "--only", "causal", "--length", "16"]) == 0


def page_of_leaks() -> Iterator[str]:
    yield from re.findall(r"`?examples/leaks/(\w+)\.py", (ROOT / "docs/leaks.md").read_text())


def test_the_gallery_shows_every_case_and_no_other() -> None:
    assert set(page_of_leaks()) == set(CASES)
