"""A worker process that `launch` starts: `python -m manyformer.train.worker RUN-FILE EVENTS [fresh]`."""

import os
import sys
from pathlib import Path

from manyformer.errors import UserError
from manyformer.train.event_protocol import encode
from manyformer.train.process_group import process_group_from_environment
from manyformer.train.run_folder import as_training_run
from manyformer.train.run_training import train_in_process


def main(run_file: str, events: str, *options: str) -> None:
    """Train; the main process writes its process id and then its events into the file `events`."""
    process_group = process_group_from_environment()
    assert process_group is not None, "this module is started by torchrun"
    with open(events if process_group.is_main_process else os.devnull, "a", encoding="utf-8", buffering=1) as file:
        print(os.getpid(), file=file)
        try:
            train_in_process(
                as_training_run(Path(run_file)),
                process_group,
                fresh="fresh" in options,
                on_event=lambda event: print(encode(event), file=file),
            )
        except UserError as error:
            print(encode(error), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
