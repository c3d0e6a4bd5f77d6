"""A disk without room, as the system tells of it."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """What the system does on a full disk: a write of a file fails, in the midst of it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    without_bytecode = sys.dont_write_bytecode
    # a module that is imported meanwhile would leave the beginning of its compiled file for all later processes
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = without_bytecode
