"""Completion in shells: what is offered for each kind of argument, and that bash and zsh take what is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_start import LOOK, python

import manyformer as mf
from manyformer.cli import run
from manyformer.cli.options import complete_recipes
from manyformer.config import shipped_comparisons, shipped_runs

SHELLS = ("bash", "zsh")


def completed(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is offered for the last of the words, as bash asks for it."""
    monkeypatch.setenv("_MANYFORMER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["manyformer", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    return capsys.readouterr().out.split()


def test_complete_recipes_are_those_that_importing_registers() -> None:
    assert complete_recipes() == sorted(mf.recipes())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tra"], ["train", "translate", "transcribe"]),
        (["show", "gml"], ["gmlp", "gmlp-encoder", "gmlp-vit"]),
        (["show", "gmlp", "--mix"], ["--mixing"]),
        (["check", "runs/"], ["runs/first", "runs/second"]),
        (["generate", ""], ["runs/first", "runs/second"]),
        (["plot", "runs/first", "runs/s"], ["runs/second"]),
        (["train", "mi"], ["mixture-of-depths", "mixtral", "mine.yaml"]),
        (["train", "mixtral", "mi"], []),
        (["train", "lm/"], [name for name in shipped_runs() if name.startswith("lm/")]),
        (["runs", "copy", "lm/s"], ["lm/shakespeare", "lm/stdlib"]),
        (["compare", "positions/"], [name for name in shipped_comparisons() if name.startswith("positions/")]),
        (["compare", "five"], ["five.yaml"]),
        (["convert", "runs/first", "--to", "longf"], ["longformer", "longformer-lm"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_names_are_completed(
    words: list[str],
    offered: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("mine.yaml", "five.yaml", "book.txt"):
        (tmp_path / name).touch()
    assert sorted(completed(words, monkeypatch, capsys)) == sorted(offered)


def test_completion_loads_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MANYFORMER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "manyformer train re")
    monkeypatch.setenv("COMP_CWORD", "2")
    ended = python(f"from manyformer.cli import run\ntry: run([])\nexcept SystemExit: pass\n{LOOK}")
    assert "reformer" in ended.stdout.split()
    assert ended.stderr.splitlines()[-1] == "[]"


def in_shell(shell: str, home: Path, script: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(home), "ZDOTDIR": str(home), "PATH": path}
    command = [shell, "-c", script]
    ended = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_what_is_installed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None or not Path(sys.executable).with_name("manyformer").is_file():
        pytest.skip(f"needs {shell} and the installed command")
    # a command after it: else the shell would be replaced by the command, which asks for its parent's name
    assert f"{shell} completion installed" in in_shell(shell, tmp_path, "manyformer --install-completion; true")
    if shell == "bash":
        script = "source ~/.bashrc; COMP_WORDS=(manyformer show gml); COMP_CWORD=2; _manyformer_completion manyformer; "
        offered = in_shell(shell, tmp_path, f'{script} printf "%s\\n" "${{COMPREPLY[@]}}"').split()
        assert offered == ["gmlp", "gmlp-encoder", "gmlp-vit"]
    else:
        assert in_shell(shell, tmp_path, 'source ~/.zshrc; print -- "$_comps[manyformer]"').split() == ["_manyformer"]
        asked = "_TYPER_COMPLETE_ARGS='manyformer show gml' _MANYFORMER_COMPLETE=complete_zsh manyformer"
        assert '"gmlp-encoder"' in in_shell(shell, tmp_path, asked)
