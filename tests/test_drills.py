"""A handful of drills: kills, full disks, damage, hostile folders and mutated settings."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRILLS = Path(__file__).parents[1] / "benchmarks/drills.py"


def drill(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of the drills and their trials."""
    command = [sys.executable, str(DRILLS), "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="drills look into /proc")
def test_a_few_faults_are_named_or_harmless() -> None:
    code, trials = drill("--trials", "6", "--seed", "1")
    families = {trial["family"] for trial in trials}
    assert families == {"kills", "full-disks", "damage", "hostile-folders", "mutations"}
    faults = [trial for trial in trials if trial.get("outcome") not in ("harmless", "named", None)]
    assert not faults
    assert code == 0
