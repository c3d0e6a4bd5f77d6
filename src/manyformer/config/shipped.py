"""The run files that come with the package."""

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "experiments"


def shipped_runs() -> dict[str, Path]:
    """Every shipped run file by its name, such as `lm/stdlib`, in alphabetical order."""
    found = (path for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    return dict(sorted((path.relative_to(FOLDER).with_suffix("").as_posix(), path) for path in found))


def about_run(path: Path) -> str:
    """What a run file says of itself: the comment that it begins with, in one line; empty where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("#").strip())
    return " ".join(filter(None, comment))
