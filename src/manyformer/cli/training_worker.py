"""A worker process that `launch` starts: `python -m manyformer.cli.training_worker EVENTS`, with the run as input.

Nothing here imports torch before signals are handled and the launcher is watched: the import takes seconds, in which
the launcher may end or a signal may come."""

import json
import os
import sys
import threading
import traceback
from typing import Any, NoReturn

from manyformer.base.errors import UserError
from manyformer.base.system import STOPPED, handle_stop_signals, remove_temporary_folders, resumable


def main(events: str) -> None:
    """Train the run on standard input and write events to the open file of number `events`."""
    # one line: the rest of standard input is the life of the launcher
    settings, fresh = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_launcher, name="launcher watch", daemon=True).start()
    with handle_stop_signals(watched=True):
        try:
            _train_and_report(settings, int(events), fresh=fresh)
        except KeyboardInterrupt:
            sys.exit(STOPPED)


def _end_with_launcher() -> NoReturn:
    """End this process when the one that launched it is gone: the system then closes the other end of the pipe."""
    while os.read(0, 1):
        pass
    remove_temporary_folders()
    os._exit(1)


def _train_and_report(settings: dict[str, Any], events: int, *, fresh: bool) -> None:
    """Train a run as one process of its group; its events, and the failure that may end it, are lines of the pipe."""
    from manyformer.base.plugins import import_modules
    from manyformer.config import RunConfig
    from manyformer.training.events import TrainingEvent
    from manyformer.training.launch import WorkerFailure, encode
    from manyformer.training.process_group import FailedElsewhere, process_group_from_environment
    from manyformer.training.run_folder import as_training_run, recipe_lookup
    from manyformer.training.session import train_in_process

    process_group = process_group_from_environment()
    assert process_group is not None, "this process is started by `launch`"
    with open(events, "w", encoding="utf-8", buffering=1) as file:

        def report(event: TrainingEvent | WorkerFailure) -> None:
            print(encode(event), file=file)

        try:
            # kinds of data that other packages define
            recipe_lookup()
            import_modules(settings["import"])
            run = as_training_run(RunConfig.model_validate(settings))
            with resumable():
                train_in_process(run, process_group, fresh=fresh, on_event=report)
        except FailedElsewhere:
            sys.exit(1)
        except Exception as error:
            report(WorkerFailure.of(error))
            if not isinstance(error, UserError):
                traceback.print_exc()
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
