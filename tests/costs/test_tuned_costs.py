"""Costs that were measured on this machine are used and named; any other file is not used, and its problem is told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.bench import call_costs
from manyformer.costs import tuned_costs
from manyformer.costs.cost_model import CostModel
from manyformer.costs.tuned_costs import FOLDER_VARIABLE, CostsInUse, TunedCosts, machine_name, read_tuned_costs
from manyformer.kernels import softmax_kernel

BLOCKS = tuple(size for size, _ in CostModel().pair_rates)
COSTS: dict[str, Any] = {
    "machine": machine_name(),
    "date": "2026-11-23",
    "attention_call": 4700,
    "sparse_call": 4100,
    "pair_rates": tuple((size, 1.5) for size in BLOCKS),
    "masked_pair": 0.0,
    "merged_token": 1,
    "gathered_key": 14,
}


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / "costs.json"


def test_every_process_uses_the_file(file: Path) -> None:
    TunedCosts(**COSTS).write(file)
    code = "from manyformer.costs.cost_model import tuned_costs; c, _ = tuned_costs(); "
    code += "print(c.attention_call, c.pair_rates, c.lse_block)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"4700 {COSTS['pair_rates']} {CostModel().lse_block}"


def test_explain_names_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "; costs measured on this machine on 2026-11-23"
    monkeypatch.setattr(softmax_kernel, "tuned_costs", lambda: (CostModel(), CostsInUse({}, note)))
    model = mf.build("transformer-lm", vocab=20, dim=16, depth=1, heads=2)
    (reason,) = mf.explain(model, torch.zeros(1, 4, dtype=torch.long)).values()
    assert reason.endswith(note)


def test_no_file_is_no_problem() -> None:
    assert read_tuned_costs(BLOCKS) == CostsInUse({})


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("machine", "another", "is of another machine (another)"),
        ("attention_call", -1, "greater than or equal to 0"),
        ("attention_call", 10**12, "less than or equal to"),
        ("attention_call", True, "valid integer"),
        ("masked_pair", float("nan"), "is damaged"),
        ("pair_rates", [[64, 0.0]], "is damaged"),
        ("pair_rates", [[64, 1.0]], "has other block sizes"),
        ("unknown", 1, "not permitted"),
    ],
)
def test_other_files_are_not_used(file: Path, field: str, value: object, problem: str) -> None:
    TunedCosts(**COSTS).write(file)
    content = json.loads(file.read_text())
    # people may edit a file, which then has no sum
    del content["sum"]
    file.write_text(json.dumps(content | {field: value}))
    in_use = read_tuned_costs(BLOCKS)
    assert in_use.values == {}
    assert problem in in_use.problem


def test_a_damaged_file_is_told(file: Path) -> None:
    file.write_bytes(b"\0" * 100)
    done = subprocess.run(
        [sys.executable, "-c", "from manyformer.costs.cost_model import tuned_costs; tuned_costs(), tuned_costs()"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count(f"{file} is damaged") == 1
    assert "`manyformer doctor --tune` measures again" in done.stderr


def test_what_is_measured_can_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_costs, "TOKENS", 256)
    tuned = call_costs.tune_costs(1)
    tuned.write(tuned_costs.costs_file())
    assert read_tuned_costs(BLOCKS).values == tuned.values
    assert set(tuned.values) == set(call_costs.COSTS_IN_PAIRS)
