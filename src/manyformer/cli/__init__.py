"""The command line: a file for each command, or for a few of one kind; torch is imported only when a command runs."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from manyformer.base.system import STOPPED, begin_start, flush_or_discard, handle_stop_signals, prepare_streams

MODULES = {
    "list": "show",
    "translate": "generate",
    "caption": "generate",
    "transcribe": "generate",
    "record": "play",
    "attention": "view",
    "spans": "view",
    "prune": "heads",
    "import": "convert",
    "export": "convert",
    "baselines": "evaluate",
    "regress": "plot",
}
"""The modules of commands that are written in that of another one of their kind."""

COMMANDS = (
    "list",
    "show",
    "runs",
    "train",
    "plan",
    "generate",
    "translate",
    "caption",
    "transcribe",
    "predict",
    "play",
    "record",
    "view",
    "attention",
    "spans",
    "heads",
    "evaluate",
    "check",
    "calibrate",
    "datastore",
    "prune",
    "import",
    "export",
    "convert",
    "bench",
    "compare",
    "advise",
    "baselines",
    "plot",
    "regress",
    "doctor",
)
"""The commands, in the order of `manyformer --help`."""


def main() -> None:
    """The entry point of the installed command."""
    # Before torch is loaded: its threads then sleep when they wait for each other. Spinning, as they would for long
    # otherwise, gains nothing on a quiet machine and makes a step several times slower beside any other busy process.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    prepare_streams()
    begin_start()
    # a process of torchrun gets its signals from torchrun, which decides when it ends
    with handle_stop_signals(watched="RANK" not in os.environ):
        code = run(sys.argv[1:])
    flush_or_discard(sys.stdout)
    # the objects of the process go with it: nothing is looked for among them
    gc.freeze()
    gc.disable()
    if code == STOPPED:
        # at once: the exit handlers and native threads of libraries may take seconds
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; messages go to stderr, results to stdout."""
    try:
        # within the try: Ctrl-C while modules are imported must end as quietly as later
        import_commands()
        from manyformer.cli.app import run_command

        return run_command(arguments)
    except KeyboardInterrupt:
        # on a new line, because a line of output may be incomplete
        print("\nstopped", file=sys.stderr)
        return STOPPED


def import_commands() -> None:
    """Import all commands, which registers them, and bring them into the order of `COMMANDS`."""
    for name in COMMANDS:
        importlib.import_module(f"manyformer.cli.{MODULES.get(name, name)}")
    from manyformer.cli.app import sort_commands

    sort_commands(COMMANDS)
