"""Starting: what is loaded, help, versions, exit codes, closed pipes, interruptions."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Cli

import manyformer as mf
from manyformer.cli import COMMANDS

HEAVY = ("torch", "numpy", "transformers", "datasets", "matplotlib", "tensorboard", "sacrebleu", "tokenizers", "babel")
LOOK = f"import sys; found = [name for name in {HEAVY!r} if name in sys.modules]; print(found, file=sys.stderr)"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def module(*words: str, **settings: object) -> list[str]:
    return [sys.executable, "-m", "manyformer", *words]


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["train", "--help"], ["runs"], ["trian"]])
def test_nothing_heavy_is_loaded_before_it_is_needed(words: list[str]) -> None:
    ended = python(f"from manyformer.cli import run; run({words!r}); {LOOK}")
    assert ended.stderr.splitlines()[-1] == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert python(f"import manyformer; manyformer.__version__; {LOOK}").stderr == "[]\n"


def test_verbs_stay_verbs_when_their_folders_are_imported() -> None:
    code = "import manyformer.recipes, manyformer.recipes.parts, manyformer as mf; "
    code += "print(mf.check.__name__, mf.generate.__name__, mf.train.__name__, 'bert' in mf.recipes())"
    assert python(code).stdout == "check generate train True\n"


def test_alone_it_shows_its_commands(cli: Cli) -> None:
    ended = cli()
    assert ended.code == 0
    assert all(name in ended.out for name in COMMANDS)
    assert ended.out.split() == cli("--help").out.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_with_examples(cli: Cli, name: str) -> None:
    ended = cli(name, "--help")
    assert ended.code == 0
    assert "Examples" in ended.out
    assert f"manyformer {name}" in ended.out


def test_version_and_module(cli: Cli) -> None:
    assert cli("--version").out == f"manyformer {mf.__version__}\n"
    ended = subprocess.run(module("--version"), capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == f"manyformer {mf.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "error: no such command 'trian'. Did you mean 'train'?"),
        (["list", "--jsn"], "error: there is no option --jsn; did you mean --json?"),
        (["list", "--zzz"], "error: there is no option --zzz; --help lists the options"),
        (["show", "transfomer"], "there is no recipe 'transfomer'; did you mean transformer"),
        (["show", "transformer", "dept=3"], "did you mean model.depth?"),
        (["show", "bert", "--lenght", "9"], "(or the option --length?)"),
        (["list", "no-such"], "no recipe matches 'no-such'"),
        (["list", "--task", "translatoin"], "did you mean translation?"),
        (["runs", "show", "lm/stdlb"], "did you mean lm/stdlib"),
        (["train", "lm/stdlb"], "did you mean lm/stdlib"),
        (["train", "lm/stdlib", "--dry-rn"], "(or the option --dry-run?)"),
        (["train", "lm/stdlib", "optim.lrr=1", "depht=3"], "did you mean optim.lr?"),
        (["train"], "train needs a name or a file"),
        (["generate", "no-such-run"], "there is no folder no-such-run"),
        (["check", "bertt"], "did you mean bert or roberta?"),
        (["check", "bert", "--only", "causl"], "there is no contract 'causl'; did you mean causal"),
        (["plot", "no-such-run"], "no-such-run holds no run"),
        (["evaluate"], "missing argument"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli: Cli, words: list[str], said: str) -> None:
    ended = cli(*words)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_all_mistakes_of_a_run_are_reported_together(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("recipe: transformer-lm\nmodel:\n  dpeth: 3\noptim:\n  lr: fast\n")
    ended = cli("train", str(file), "batch.tokns=5")
    assert ended.code == 2
    assert [line.split(": ")[0] for line in ended.err.splitlines()] == ["error"] * 3
    assert f"{file}:3:3" in ended.err
    assert f"{file}:5:" in ended.err


def test_debug_shows_where(cli: Cli) -> None:
    for words in (["--debug", "show", "nobody"], ["show", "nobody", "--debug"]):
        ended = cli(*words)
        assert ended.code == 2
        assert "Traceback" in ended.err
        assert "error: there is no recipe 'nobody'" in ended.err


def test_a_defect_is_reported_as_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr("manyformer.cli.doctor.examine", broken)
    ended = cli("doctor")
    assert ended.code == 1
    assert "error: KeyError: 'lost'" in ended.err
    assert "--debug" in ended.err
    assert "Traceback" not in ended.err


def test_ctrl_c_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("manyformer.cli.doctor.examine", interrupted)
    assert cli("doctor").code == 130


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `| head -1`: the pipe is closed while there is more to say, which a small pipe makes sure of."""
    process = subprocess.Popen(
        module("list", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, pipesize=4096, bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"["
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
    process.stderr.close()


def test_a_run_stopped_by_ctrl_c_saves_and_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
    words = ["train", "transformer-lm", "data.path=text.txt", "data.tokenizer=char", "data.length=32", "dim=32"]
    words += ["depth=1", "heads=2", "batch.tokens=512", "limits.steps=100000", "evaluate.every=100000", "out=here"]
    process = subprocess.Popen(
        module(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread()
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step"):
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    step = int(err.split("step ")[1].split(",")[0])
    assert "The same command continues" in err
    again = [*words, "--json", f"limits.steps={step + 5}", "evaluate.every=5"]
    monkeypatch.chdir(tmp_path)
    ended = cli(*again)
    assert ended.code == 0, ended.err
    assert f"resuming from step {step}" in ended.err
    assert json.loads(ended.out)["step"] == step + 5


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_very_long_value_is_cut_in_its_error(cli: Cli) -> None:
    ended = cli("show", "x" * 100_000)
    assert ended.code == 2
    assert len(ended.err) < 3_000
    assert "x: (100,001 characters)" in ended.err


def test_an_empty_path_is_refused(cli: Cli) -> None:
    ended = cli("train", "transformer-lm", "data.path=")
    assert ended.code == 2
