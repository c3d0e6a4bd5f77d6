"""A worker process that `launch` starts: `python -m manyformer.training_worker EVENTS`, with the run as input."""

import json
import os
import sys
import threading
from typing import NoReturn

from manyformer.system.stop_signals import STOPPED, handle_stop_signals
from manyformer.system.temporary_folders import remove_temporary_folders


def main(events: str) -> None:
    """Train the run on standard input and write events to the open file of number `events`."""
    settings, fresh = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_launcher, name="launcher watch", daemon=True).start()
    with handle_stop_signals(watched=True):
        try:
            # now, because importing torch takes seconds, in which the launcher may end or a signal may come
            from manyformer.train.worker import train_and_report

            train_and_report(settings, int(events), fresh=fresh)
        except KeyboardInterrupt:
            sys.exit(STOPPED)


def _end_with_launcher() -> NoReturn:
    """End this process when the one that launched it is gone: the system then closes the other end of the pipe."""
    while os.read(0, 1):
        pass
    remove_temporary_folders()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
