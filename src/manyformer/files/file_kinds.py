"""What stands where a file is expected: reading a pipe or a device can wait, or go on, forever."""

import stat
from pathlib import Path


def special_kind(path: Path) -> str | None:
    """What is at the path, in words, if it is neither a regular file nor a folder; None too if there is nothing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    if stat.S_ISFIFO(mode):
        return "a pipe, which can be read only once"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"
