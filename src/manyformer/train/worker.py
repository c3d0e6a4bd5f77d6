"""A worker process that `launch` starts: `python -m manyformer.train.worker EVENTS`."""

import json
import os
import sys
import threading
import traceback
from typing import NoReturn

from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.plugins import import_modules
from manyformer.stop_signals import handle_stop_signals, resumable
from manyformer.temporary_folders import remove_temporary_folders
from manyformer.train.event_protocol import WorkerFailure, encode
from manyformer.train.events import TrainingEvent
from manyformer.train.process_group import FailedElsewhere, process_group_from_environment
from manyformer.train.run_folder import as_training_run, recipe_lookup
from manyformer.train.run_training import train_in_process


def main(events: str) -> None:
    """Train the run on standard input and write events to the open file of number `events`."""
    settings, fresh = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_launcher, name="launcher watch", daemon=True).start()
    process_group = process_group_from_environment()
    assert process_group is not None, "this module is started by `launch`"
    with open(int(events), "w", encoding="utf-8", buffering=1) as file, handle_stop_signals(watched=True):

        def report(event: TrainingEvent | WorkerFailure) -> None:
            print(encode(event), file=file)

        try:
            # kinds of data that other packages define
            recipe_lookup()
            import_modules(settings["import"])
            run = as_training_run(RunConfig.model_validate(settings))
            with resumable():
                train_in_process(
                    run, process_group, fresh=fresh, on_event=lambda event: print(encode(event), file=file)
                )
        except FailedElsewhere:
            sys.exit(1)
        except Exception as error:
            report(WorkerFailure.of(error))
            if not isinstance(error, UserError):
                traceback.print_exc()
            sys.exit(1)


def _end_with_launcher() -> NoReturn:
    """End this process when the one that launched it is gone: the system then closes the other end of the pipe."""
    while os.read(0, 1):
        pass
    remove_temporary_folders()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
