"""The command line: one file for each command; torch is imported only when a command runs."""

import importlib

from manyformer.cli.app import main, run

__all__ = ["main", "run"]

COMMANDS = (
    "list",
    "show",
    "runs",
    "train",
    "generate",
    "translate",
    "predict",
    "attention",
    "efforts",
    "evaluate",
    "check",
    "calibrate",
    "thresholds",
    "collaborate",
    "datastore",
    "memorize",
    "bench",
    "compare",
    "plot",
    "doctor",
)
"""The modules of the commands, in the order of `manyformer --help`."""

for _command in COMMANDS:
    importlib.import_module(f"manyformer.cli.{_command}")
