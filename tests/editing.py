"""Changing the JSON files of a folder as a person would who wants them to be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_record(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a record in place, and remove the sum of what it was."""
    content = json.loads(file.read_text())
    content.pop("sum", None)
    change(content)
    file.write_text(json.dumps(content))
