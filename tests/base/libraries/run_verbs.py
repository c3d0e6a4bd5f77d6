"""Carries out command lines in one process, each with a time limit, and says what they left of standard input.

`python run_verbs.py SECONDS` reads the command lines as JSON from the environment, prints the outcomes as JSON."""

import array
import contextlib
import fcntl
import io
import json
import os
import signal
import sys
import termios
import time
import traceback
from typing import Any


class TooLong(BaseException):
    """A command did not end in time."""


def _stop(*_: object) -> None:
    raise TooLong


def _unread() -> int:
    """How many bytes of the pipe that is standard input nobody has read."""
    count = array.array("i", [0])
    fcntl.ioctl(0, termios.FIONREAD, count)
    return count[0]


def outcome(arguments: list[str], seconds: int) -> dict[str, Any]:
    """The exit code of a command, its last line, and whether it read standard input."""
    from manyformer import load
    from manyformer.base.errors import UserError
    from manyformer.cli import run

    before, texts, begin = _unread(), io.StringIO(), time.monotonic()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    code: int | str
    try:
        with contextlib.redirect_stdout(texts), contextlib.redirect_stderr(texts):
            if arguments[0] == "mf.load":
                load(arguments[1])
                code = 0
            else:
                code = run(arguments)
    except UserError as error:
        code = 2
        texts.write(str(error))
    except TooLong:
        code = "hung"
    except BaseException:
        code = "crashed"
        texts.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    said = texts.getvalue().strip().splitlines()[-8:]
    return {
        **{"command": " ".join(arguments), "code": code, "said": said, "read": before - _unread()},
        "seconds": round(time.monotonic() - begin, 1),
    }


if __name__ == "__main__":
    commands = json.loads(os.environ["VERBS"])
    out = sys.stdout
    print(json.dumps([outcome(command, int(sys.argv[1])) for command in commands]), file=out)
