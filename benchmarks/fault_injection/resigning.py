"""Sums that are made right again after files were changed, whatever the manifests look like."""

import hashlib
import json
from pathlib import Path
from typing import Any


def sign_again(folder: Path, before: dict[Path, bytes]) -> None:
    """Replace the SHA-256 and the size of each changed file in every JSON file that holds them.

    A manifest that changes by this is signed anew wherever it is listed itself.
    """
    known = dict(before)
    for _ in range(5):
        changed = {path: content for path, content in known.items() if _differs(path, content)}
        if not changed:
            return
        replacements = {}
        for path, content in changed.items():
            known[path] = now = path.read_bytes()
            replacements[_sum(content)] = (_sum(now), len(content), len(now))
        for manifest in folder.rglob("*.json"):
            if manifest.is_file() and not manifest.is_symlink():
                _sign(manifest, replacements)


def _differs(path: Path, content: bytes) -> bool:
    return _is_small(path) and path.read_bytes() != content


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sign(manifest: Path, replacements: dict[str, tuple[str, int, int]]) -> None:
    try:
        text = manifest.read_text(encoding="utf-8")
        if len(text) > 1 << 20 or not any(old in text for old in replacements):
            return
        # an equal file of the manifest's own folder that was not changed keeps its sum
        unchanged = {_sum(path.read_bytes()) for path in manifest.parent.rglob("*") if _is_small(path)}
        value = _replaced(json.loads(text), {old: new for old, new in replacements.items() if old not in unchanged})
    except (ValueError, RecursionError):
        return
    value.pop("sum", None)
    manifest.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _replaced(value: Any, replacements: dict[str, tuple[str, int, int]]) -> Any:
    """The value with new sums, and new sizes beside them."""
    if isinstance(value, str):
        return replacements[value][0] if value in replacements else value
    if isinstance(value, list):
        return [_replaced(part, replacements) for part in value]
    if not isinstance(value, dict):
        return value
    sizes = {old: new for text, (_, old, new) in replacements.items() if text in value.values()}
    return {
        key: sizes[part] if isinstance(part, int) and part in sizes else _replaced(part, replacements)
        for key, part in value.items()
    }
