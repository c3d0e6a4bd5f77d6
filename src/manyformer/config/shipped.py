"""The run files and comparisons that come with the package."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "experiments"
COMPARISONS = "comparisons"
"""The folder below it for comparison files, which `manyformer compare` reads."""
SUITE_RESULTS = FOLDER / "results" / "suite-full.json"
"""The results of the comparison `suite/full` that the documentation shows, as `manyformer advise` reads them."""
MEASURED_SCORES = FOLDER / "results" / "scores.json"
"""Scores of comparisons, as the documentation shows them; `manyformer advise` quotes them."""
STEP_COSTS = FOLDER / "results" / "steps.json"
"""The time of training steps of recipes that no suite compares, as `benchmarks/step_costs.py` has measured them."""
DECODING_COSTS = FOLDER / "results" / "by-length.json"
"""State and speed of decoding at several lengths, as `manyformer bench` has measured them."""
COUNTED_COSTS = FOLDER / "results" / "costs.json"
"""Operations and state of every recipe with the sizes of its paper: a length, operations and bytes of state each."""
COUNTED_GRAPHS = FOLDER / "results" / "graphs.json"
"""The graphs that `torch.compile` makes of a training step of recipes, and what they end at."""
LEDGER = FOLDER / "results" / "ledger.json"
"""Published figures of recipes, and ours on the same data."""
SHIPPED_CURVES = FOLDER / "results" / "curves.jsonl"
"""The curves of shipped runs that `manyformer train` shows beside those of the same run."""


def shipped_runs() -> dict[str, Path]:
    """Every shipped run file by its name, such as `lm/stdlib`, in alphabetical order."""
    files = _files(FOLDER)
    return {name: path for name, path in files.items() if not name.startswith(f"{COMPARISONS}/")}


def shipped_comparisons() -> dict[str, Path]:
    """Every shipped comparison by its name, such as `positions/extrapolation`, in alphabetical order."""
    return _files(FOLDER / COMPARISONS)


def is_shipped(file: str) -> bool:
    """Whether this is a file that comes with the package; "" is none."""
    return bool(file) and Path(file).resolve().is_relative_to(FOLDER.resolve())


def _files(folder: Path) -> dict[str, Path]:
    paths = (path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    return dict(sorted((path.relative_to(folder).with_suffix("").as_posix(), path) for path in paths))


def run_description(path: Path) -> str:
    """The leading comment of a run file in one line; empty if there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("#").strip())
    return " ".join(filter(None, comment))


def first_sentence(text: str) -> str:
    """The first sentence of a description, without a colon at its end."""
    return re.split(r"(?<=[.?:])\s+(?=[A-Z`\"])", text, maxsplit=1)[0].rstrip(":")
