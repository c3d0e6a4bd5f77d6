"""The pre-commit hook and the GitHub action: their files are as these tools want them, and their commands run."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_pytest_plugin import MODELS

ROOT = Path(__file__).parents[3]
ACTION = ROOT / "packages" / "manyformer-check" / "action.yml"

HOOK_KEYS = {
    *("id", "name", "description", "entry", "language", "files", "args"),
    *("pass_filenames", "require_serial", "minimum_pre_commit_version"),
}
"""The keys that pre-commit knows and that are used here."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of models, in which `manyformer-check` is this checkout's and `python` writes down calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = f'exec {shlex.quote(sys.executable)} -m manyformer.analysis.contracts.command "$@"'
    for name, line in (
        ("manyformer-check", program),
        ("python", f'echo "$@" >> {shlex.quote(str(tmp_path / "calls"))}'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def test_the_hook_is_one_that_pre_commit_takes_and_its_command_tells_honest_models(workplace: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert set(hook) <= HOOK_KEYS
    assert hook["language"] == "system"
    # with names of files it would take them for models
    assert hook["pass_filenames"] is False
    options = ["--only", "causal", "--length", "16"]
    # also without arguments in its configuration
    for arguments, code in ((["models.py:honest", *options], 0), ([], 2)):
        words = [*shlex.split(hook["entry"]), *arguments]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr


def run_step(step: dict[str, Any], given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as GitHub does, with what it puts in the place of its expressions."""
    values = {name: given[text.removeprefix("${{ ").removesuffix(" }}")] for name, text in step["env"].items()}
    assert step["shell"] == "bash"
    assert "${{" not in step["run"]
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(words, env={**os.environ, **values}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("bash"), reason="the action's steps are for bash")
def test_the_action_installs_checks_and_reports(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    install, check = action["runs"]["steps"]
    given = {f"inputs.{name}": str(item.get("default", "")) for name, item in action["inputs"].items()}
    given["github.action_path"] = str(ACTION.parent)
    assert run_step(install, given).returncode == 0
    assert (workplace / "calls").read_text() == f"-m pip install {ACTION.parent}\n"
    assert (ACTION.parent / "pyproject.toml").is_file()
    for models, code, sentence in (
        ("models.py:honest models.py:leaking", 1, "the future leaks"),
        ("models.py:missing", 2, "missing"),
    ):
        output = workplace / f"output{code}"
        summary = workplace / f"summary{code}"
        monkeypatch.setenv("GITHUB_OUTPUT", str(output))
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        arguments = {"inputs.models": f"\n{models}\n", "inputs.arguments": "--only causal --length 16"}
        assert run_step(check, given | arguments).returncode == code
        assert output.read_text() == f"exit-code={code}\n"
        assert sentence in summary.read_text()
        assert sentence in (workplace / "manyformer-check.txt").read_text()
