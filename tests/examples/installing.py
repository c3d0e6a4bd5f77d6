"""Installs a package's sources into a folder, as pip would, but without a network or a build tool."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def install(project: Path, target: Path) -> None:
    """Copy the packages of a project with a `src` folder into `target`, and write the metadata that pip writes."""
    for package in (project / "src").iterdir():
        shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = target / f"{settings['name'].replace('-', '_')}-{settings['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {settings['name']}\nVersion: {settings['version']}\n")
    (info / "top_level.txt").write_text("".join(f"{package.name}\n" for package in (project / "src").iterdir()))
    groups = settings.get("entry-points", {}).items()
    text = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items()) for group, names in groups]
    (info / "entry_points.txt").write_text("\n".join(text))


SERVER = """
import json, os, sys, traceback
# before the package under test, which the folder may hold a changed copy of
sys.path.insert(0, sys.argv[1])
import torch
import pytest
import manyformer.analysis.benchmarks, manyformer.analysis.contracts, manyformer.analysis.comparisons
import manyformer.inference.evaluate, manyformer.inference.generate, manyformer.training
from manyformer.cli import run

torch.set_num_threads(1)
for line in sys.stdin:
    program, arguments, out, err = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            for number, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            code = int({"manyformer": run, "pytest": pytest.main}[program](arguments))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Has imported torch and the library, but no package that adds to it, and forks for each command."""


class Process:
    """Runs Python in new processes that see the packages installed in `target`, from the folder `cwd`."""

    def __init__(self, target: Path, cwd: Path) -> None:
        self.cwd = cwd
        path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH", "")]))
        # options of the run around it, such as a share of the slow tests, are not options of the package's own tests
        settings = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(target)],
            cwd=cwd,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def manyformer(self, *arguments: str) -> str:
        """The output of a command that must succeed."""
        return self._run("manyformer", *arguments)

    def pytest(self, *arguments: str) -> str:
        """The output of tests that must pass."""
        # libraries that the tests might rewrite are loaded already
        loaded = "ignore::pytest.PytestAssertRewriteWarning"
        return self._run("pytest", "-q", "-p", "no:cacheprovider", "-W", loaded, *arguments)

    def _run(self, program: str, *arguments: str) -> str:
        """The output of a program in a new fork of the process that has loaded torch."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        out, err = (self.cwd / name for name in ("command.out", "command.err"))
        self.server.stdin.write(json.dumps([program, arguments, str(out), str(err)]) + "\n")
        self.server.stdin.flush()
        code = self.server.stdout.readline().strip()
        if code != "0":
            pytest.fail(f"{program} {' '.join(arguments)} ended with {code}: {out.read_text()}{err.read_text()}")
        return out.read_text()

    def close(self) -> None:
        """Ends the process that forks."""
        self.server.communicate(timeout=60)
