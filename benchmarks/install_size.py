"""The size of a library, the packages that it brings, and what importing it costs.

    python benchmarks/install_size.py . x-transformers litgpt transformers

Asks pip what it would install into an empty environment, downloads or builds the wheel of the library itself, and times
`import` in new processes for those that are installed here: processor time, the median of five. Needs a package index.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

IMPORTS = 5


def pip_report(python: Path, library: str, folder: Path) -> list[dict[str, Any]]:
    """The distributions that pip would install."""
    report = folder / "report.json"
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", report]
    subprocess.run([python, "-m", "pip", "install", *options, library], check=True)
    distributions: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return distributions


def wheel_bytes(python: Path, library: str, folder: Path) -> int:
    """The size of the library's own wheel."""
    wheels = folder / "wheels"
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, library]
    subprocess.run(command, check=True)
    (wheel,) = wheels.glob("*.whl")
    size = wheel.stat().st_size
    wheel.unlink()
    return size


def import_seconds(module: str) -> float:
    """The processor time of a process that imports a module, without that of an empty process."""
    return _process_seconds(f"import {module}") - _process_seconds("")


def _process_seconds(code: str) -> float:
    seconds = []
    for _ in range(IMPORTS):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", help="names of the package index, or folders")
    libraries = parser.parse_args().libraries
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "empty", with_pip=True)
        python = folder / "empty/bin/python"
        torch = {_name(part) for part in pip_report(python, "torch", folder)}
        for library in libraries:
            parts = pip_report(python, library, folder)
            (own,) = (_name(part) for part in parts if part["requested"])
            further = {_name(part) for part in parts} - torch - {own}
            size = wheel_bytes(python, library, folder)
            text = f"{own}: wheel {size / 1e6:.2f} MB, {len(parts)} packages, {len(further)} besides torch and its own"
            module = own.replace("-", "_")
            try:
                metadata.version(own)
            except metadata.PackageNotFoundError:
                print(f"{text}, not installed here", flush=True)
            else:
                print(f"{text}, import {import_seconds(module):.2f} s", flush=True)


def _name(part: dict[str, Any]) -> str:
    return re.sub(r"[-_.]+", "-", str(part["metadata"]["name"])).lower()


if __name__ == "__main__":
    main()
