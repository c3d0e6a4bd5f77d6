"""The run files and comparisons that come with the package."""

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "experiments"
COMPARISONS = "comparisons"
"""The folder below for files that are compared, not trained: `manyformer compare` reads them."""


def shipped_runs() -> dict[str, Path]:
    """Every shipped run file by its name, such as `lm/stdlib`, in alphabetical order."""
    found = _files(FOLDER)
    return {name: path for name, path in found.items() if not name.startswith(f"{COMPARISONS}/")}


def shipped_comparisons() -> dict[str, Path]:
    """Every shipped comparison by its name, such as `positions/extrapolation`, in alphabetical order."""
    return _files(FOLDER / COMPARISONS)


def _files(folder: Path) -> dict[str, Path]:
    found = (path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    return dict(sorted((path.relative_to(folder).with_suffix("").as_posix(), path) for path in found))


def about_run(path: Path) -> str:
    """What a run file says of itself: the comment that it begins with, in one line; empty where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("#").strip())
    return " ".join(filter(None, comment))
