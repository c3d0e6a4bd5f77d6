"""Installs a package's sources into a folder, as pip would, but without a network or a build tool."""

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


class Process:
    """Runs Python in new processes that see the packages installed in `target`, from the folder `cwd`."""

    def __init__(self, target: Path, cwd: Path) -> None:
        self.cwd = cwd
        path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH", "")]))
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The finished process, whatever its exit code."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def manyformer(self, *arguments: str) -> str:
        """The output of a command that must succeed."""
        done = self.python("-m", "manyformer", *arguments)
        if done.returncode:
            pytest.fail(f"manyformer {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout
