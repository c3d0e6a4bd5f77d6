"""The page of what GPUs have shown: the results of `benchmarks/gpu.py` in `docs/gpu`, one file for each machine."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "gpu"
sys.path.insert(0, str(HERE.parent / "benchmarks"))
from gpu_parts.kept_results import read_results  # noqa: E402 - modules of that folder
from gpu_parts.page import page  # noqa: E402

ABOUT = """
Measured by `python benchmarks/gpu.py` ([its waves](bench.md)), what failed first. The files in `docs/gpu`
have every item.
"""


def gpu_results_page(mark: str) -> str:
    """All kept results as one page."""
    results = [read_results(path) for path in sorted(RESULTS.glob("*.json"))]
    title, _, rest = page(results, []).partition("\n")
    notes = (RESULTS / "notes.txt").read_text(encoding="utf-8")
    return f"{mark}{title}\n{ABOUT}\n{notes}{rest}"
