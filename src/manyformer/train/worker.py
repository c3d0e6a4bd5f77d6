"""One of the processes that `launch` starts: `python -m manyformer.train.worker RUN-FILE EVENTS [fresh]`."""

import os
import sys
from pathlib import Path

from manyformer.errors import UserError
from manyformer.train.event_protocol import encode
from manyformer.train.process_group import from_environment
from manyformer.train.run_folder import as_run
from manyformer.train.run_training import take_part


def main(run_file: str, events: str, *options: str) -> None:
    """Train; the first process writes what happens, its own number first, into the file `events`."""
    world = from_environment()
    assert world is not None, "torchrun starts this"
    with open(events if world.first else os.devnull, "a", encoding="utf-8", buffering=1) as file:
        print(os.getpid(), file=file)
        try:
            take_part(
                as_run(Path(run_file)),
                world,
                fresh="fresh" in options,
                tell=lambda event: print(encode(event), file=file),
            )
        except UserError as error:
            print(encode(error), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
