"""The files that start trainings on clusters start the documented command, read by torchrun and manyformer."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from manyformer import cli
from manyformer.config import load_run
from manyformer.training.run_folder import recipe_lookup

FOLDER = Path(__file__).parents[1] / "docs/how-to/launch"


def from_slurm(tmp_path: Path) -> list[str]:
    """What the script would start, run by bash with commands of Slurm that only print."""
    # more names than a pipe holds: a script that stops reading after the first would be killed
    answers = {"srun": 'printf "%s\\n" "$@"', "scontrol": 'printf "node-%d\\n" {1..20000}', "python": 'echo "$@" >&2'}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8"}
    script = ["bash", str(FOLDER / "slurm.sbatch")]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, check=True)
    option, *command = done.stdout.splitlines()
    assert option == "--no-kill"
    # the settings are read before the processes are started
    assert done.stderr.split() == [*command[command.index("manyformer") - 1 :], "--print-config"]
    return command


def from_kubernetes(tmp_path: Path) -> list[str]:
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # the names by which the pods find each other
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    command: list[str] = container["command"]
    return command


@pytest.mark.parametrize(
    ("read", "endpoint", "nodes"),
    [
        (from_slurm, "node-1:29500", "2"),
        (from_kubernetes, "manyformer-0.manyformer:29500", "1:2"),
    ],
)
def test_the_command_is_ours(read: Callable[[Path], list[str]], endpoint: str, nodes: str, tmp_path: Path) -> None:
    command_line = read(tmp_path)
    # not looked up in PATH by Slurm, whose nodes may have another one
    start = ["python", "-m", "torch.distributed.run"] if read is from_slurm else ["torchrun"]
    assert command_line[: len(start)] == start
    words = command_line[len(start) :]
    options = get_args_parser().parse_args(words)
    assert (options.rdzv_backend, options.rdzv_endpoint, options.nnodes) == ("c10d", endpoint, nodes)
    assert (options.nproc_per_node, options.max_restarts) == ("8", 3)
    assert options.module
    assert options.training_script == "manyformer"
    command, file, *settings = options.training_script_args
    assert command == "train"
    assert file == "mine.yaml"
    (tmp_path / file).write_text("recipe: transformer-lm\n")
    run = load_run(tmp_path / file, settings, recipes=recipe_lookup())
    assert (run.strategy, run.out) == ("fsdp", "runs/mine")


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m manyformer WORDS`, whose words are all that the script for Ray decides, without a start of its own."""
    assert command[:3] == [sys.executable, "-m", "manyformer"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.run(command[3:])
    return subprocess.CompletedProcess(command, code, printed.getvalue())


@pytest.fixture
def ray_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script for Ray as a module, which does without Ray until it has read the run."""
    spec = importlib.util.spec_from_file_location("ray_launch", FOLDER / "ray_launch.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("recipe: transformer-lm\n")
    return module


def arguments_of(module: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["ray_launch.py", *shlex.split(words)])
    return module.parsed_arguments()


def test_the_script_for_ray_reads_the_run_that_its_page_names(ray_launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launch.subprocess, "run", in_this_process)
    (line, elastic) = re.findall(r"python ray_launch.py (.*)", (FOLDER.parent / "ray.md").read_text())
    arguments = arguments_of(ray_launch, line, monkeypatch)
    run = ray_launch.checked_run(arguments)
    assert (run["strategy"], run["out"], arguments.processes) == ("fsdp", "/shared/runs/mine", 16)
    assert arguments_of(ray_launch, elastic, monkeypatch).least == 8


def test_a_relative_folder_is_refused_by_the_script_for_ray(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_launch.subprocess, "run", in_this_process)
    arguments = arguments_of(ray_launch, "mine.yaml out=runs/mine", monkeypatch)
    with pytest.raises(SystemExit) as ended:
        ray_launch.checked_run(arguments)
    assert ended.value.code == 2
    assert "out=runs/mine must be an absolute path, of a folder that all nodes see" in capsys.readouterr().err


def test_a_mistake_ends_the_script_for_ray_before_anything_is_reserved(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_of(ray_launch, "mine.yaml out=/shared/mine strategie=fsdp", monkeypatch)
    with pytest.raises(SystemExit) as ended:
        ray_launch.checked_run(arguments)
    assert ended.value.code == 2
    assert "did you mean strategy" in capfd.readouterr().err


def test_each_file_has_its_page() -> None:
    pages = {page: page.read_text() for page in FOLDER.parent.glob("*.md")}
    for file in FOLDER.iterdir():
        if file.is_file():
            assert any(f"](launch/{file.name})" in text for text in pages.values()), shlex.quote(file.name)
