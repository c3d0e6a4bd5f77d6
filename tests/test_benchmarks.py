"""The scripts of benchmarks/ fit the library: each can be imported, and every candidate of a contest runs."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""

CONTESTS = sorted(path.name for path in FOLDER.glob("*.py") if "frame.run(__doc__" in path.read_text(encoding="utf-8"))
LEFT_OUT = {"generate_speed.py": ["batch"]}
"""Parts that take minutes, with models that another part of the script has."""
ONCE = """
import runpy, sys
import frame

def contest(title, steps, rounds, goals, memory_goals=None):
    for step in steps.values():
        step()
    return iter(())

def growth(candidate, jobs, rounds, goals):
    return contest(candidate, dict([next(iter(jobs.items()))]), rounds, goals)

def median_memory(step):
    step()
    return 1.0

parts = {}
frame.contest, frame.growth, frame.median_memory = contest, growth, median_memory
frame.run = lambda doc, script_parts, **_: parts.update(script_parts)
frame.set_threads(1)
runpy.run_path(sys.argv[1], run_name="__main__")
for name, part in parts.items():
    if name not in sys.argv[2:]:
        list(part(1))
print(len(parts))
"""


def test_every_script_is_importable() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) > 30
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    assert not done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", CONTESTS)
def test_every_candidate_of_a_contest_runs(script: str) -> None:
    """Once each, without timing."""
    arguments = [sys.executable, "-c", ONCE, script, *LEFT_OUT.get(script, [])]
    done = subprocess.run(arguments, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 0


def test_every_measured_constant_exists() -> None:
    """They are set by their names, and a new attribute would be set as silently."""
    code = "import call_costs, cost_jobs; places = [place for sweep in cost_jobs.SWEEPS for place in sweep.places]; "
    code += "print(len([place.get() for place in [*places, *(place for place, _ in call_costs.CALL_COSTS)]]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 35


def test_contests_are_found() -> None:
    assert len(CONTESTS) >= 10


PACKAGE = {
    "core.py": "class Layer(nn.Module): ...\nclass Record: ...",
    "kernels/softmax.py": "class Softmax(Layer): ...\nisinstance(x, Softmax)",
    "kernels/inner/part.py": "isinstance(x, Softmax)",
    "view/maps.py": "isinstance(x, (Softmax, Record))\nisinstance(x, int | Softmax[int])\nisinstance(x, Layer)",
}


def test_checks_of_a_layer_count_outside_the_folder_of_its_class_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(FOLDER))
    import layer_checks

    for name, text in PACKAGE.items():
        file = tmp_path / "manyformer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert layer_checks.main(["--source", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "view/maps.py:1: Softmax of kernels/softmax.py (no reason yet)",
        "view/maps.py:2: Softmax of kernels/softmax.py (no reason yet)",
        "2 checks of a module's class outside its folder",
        "without a reason: view/maps.py",
    ]
