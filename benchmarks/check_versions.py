"""Run the tests beside several releases of torch and of Python, each in an environment of its own.

Each environment gets its torch first and then manyformer with all that its tests need, as somebody would who works on a
machine that has a torch; that the installation has kept it is the first thing that is looked at. Then a share of the
tests runs, in which warnings are errors, deprecations of the newest torch among them. Prints a table in Markdown.
Installs with uv where it is on the path, which takes a minute for each environment, and with pip elsewhere.

    python benchmarks/check_versions.py
    python benchmarks/check_versions.py --torch 2.10.0 2.15.0 --python python3.12 --tests tests/nn tests/nn/ops
    python benchmarks/check_versions.py --torch 2.11.0 --folder /tmp/environments --tests tests
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

RELEASES = ("2.10.0", "2.11.0", "newest")
"""The oldest torch that is promised, that of many clusters, and the newest of the index."""

SHARE = (
    *("tests/nn", "tests/nn/ops", "tests/nn", "tests/models", "tests/inference/generate", "tests/training"),
    *("tests/nn/runtime/test_torch_internals.py", "tests/test_compilation.py"),
)
"""The tests that depend on torch most."""

OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|error)")


class VersionOutcome(NamedTuple):
    """What the tests said in one environment."""

    python: str
    torch: str
    kept: bool
    """Whether the installation of manyformer left this torch where it was."""
    passed: int
    failed: int
    skipped: int
    minutes: float
    failures: list[str]


def main() -> int:
    """Make the environments, run the tests and print the table; 1 if a test failed or a torch was replaced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=RELEASES, help="releases, or newest")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--tests", nargs="+", default=SHARE, help="files and folders of tests, and options of pytest")
    parser.add_argument("--folder", type=Path, help="keep the environments here, several GB each, and use them again")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for python in options.python:
            for release in options.torch:
                outcomes.append(check(python, release, options.tests, folder))
                print(f"{row(outcomes[-1])}", file=sys.stderr, flush=True)
    print(json.dumps([outcome._asdict() for outcome in outcomes], indent=1) if options.json else table(outcomes))
    return int(any(outcome.failed or not outcome.kept for outcome in outcomes))


def check(python: str, release: str, tests: list[str], folder: Path) -> VersionOutcome:
    """The outcome of the tests with one torch."""
    place = folder / f"python-{version_of(python, 'python')}-torch-{release}"
    interpreter = place / "bin/python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", str(place)], check=True)
    # nothing is done where it is there already
    install(interpreter, "torch" if release == "newest" else f"torch=={release}")
    before = version_of(interpreter, "torch")
    install(interpreter, "-e", f"{ROOT}[test]")
    begin = time.monotonic()
    command = [str(interpreter), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    minutes = (time.monotonic() - begin) / 60
    lines = ended.stdout.splitlines()
    counts = {kind: int(number) for number, kind in OUTCOME.findall(lines[-1] if lines else "")}
    failures = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not counts:
        # nothing ran at all
        failures, counts = lines[-5:] or ended.stderr.splitlines()[-5:], {"failed": 1}
    return VersionOutcome(
        python=".".join(version_of(interpreter, "python").split(".")[:2]),
        torch=before,
        kept=version_of(interpreter, "torch") == before,
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        minutes=minutes,
        failures=failures,
    )


def install(interpreter: Path, *packages: str) -> None:
    """Install packages; the installer's own words are shown if it fails."""
    uv = shutil.which("uv")
    installer = (
        [uv, "pip", "install", "--python", str(interpreter)] if uv else [str(interpreter), "-m", "pip", "install"]
    )
    ended = subprocess.run([*installer, "--quiet", *packages], check=False, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(installer)} {' '.join(packages)} failed:\n{ended.stderr}")


def version_of(interpreter: str | Path, what: str) -> str:
    """The version of a package in an environment, or of its Python."""
    code = "import platform; print(platform.python_version())"
    if what != "python":
        code = f"from importlib.metadata import version; print(version({what!r}))"
    return subprocess.run([str(interpreter), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def table(outcomes: list[VersionOutcome]) -> str:
    """A table in Markdown; what failed is named below it."""
    lines = [
        "| torch | Python | kept | passed | failed | skipped | minutes |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [row(outcome) for outcome in outcomes]
    lines += [f"- {outcome.torch}: {failure}" for outcome in outcomes for failure in outcome.failures]
    return "\n".join(lines)


def row(outcome: VersionOutcome) -> str:
    """One line of the table."""
    kept = "yes" if outcome.kept else "**no**"
    cells = [outcome.torch, outcome.python, kept, outcome.passed, outcome.failed, outcome.skipped]
    return f"| {' | '.join(map(str, cells))} | {outcome.minutes:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
