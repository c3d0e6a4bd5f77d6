"""The files that start trainings on clusters start the documented command, read by torchrun and manyformer."""

import importlib.util
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from manyformer.config import load_run
from manyformer.train.run_folder import recipe_lookup

FOLDER = Path(__file__).parents[1] / "docs/how-to/launch"


def from_slurm(tmp_path: Path) -> list[str]:
    """What the script would start, run by bash with commands of Slurm that only print."""
    # more names than a pipe holds: a script that stops reading after the first would be killed
    for name, answer in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", 'printf "node-%d\\n" {1..20000}')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2"}
    script = ["bash", str(FOLDER / "slurm.sbatch")]
    done = subprocess.run(script, env={**variables, "SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


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


def from_ray(tmp_path: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("ray_launch", FOLDER / "ray_launch.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    command: list[str] = module.torchrun("node-1:29500")
    return command


@pytest.mark.parametrize(
    ("read", "endpoint", "nodes"),
    [
        (from_slurm, "node-1:29500", "2"),
        (from_kubernetes, "manyformer-0.manyformer:29500", "1:2"),
        (from_ray, "node-1:29500", "2"),
    ],
)
def test_the_command_is_ours(read: Callable[[Path], list[str]], endpoint: str, nodes: str, tmp_path: Path) -> None:
    program, *words = read(tmp_path)
    assert program == "torchrun"
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


def test_each_file_has_its_page() -> None:
    pages = {page: page.read_text() for page in FOLDER.parent.glob("*.md")}
    for file in FOLDER.iterdir():
        if file.is_file():
            assert any(f"](launch/{file.name})" in text for text in pages.values()), shlex.quote(file.name)
