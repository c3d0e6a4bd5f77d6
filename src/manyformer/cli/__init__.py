"""The command line. One file a command; nothing here loads torch before a command runs."""

import importlib

from manyformer.cli.app import main, run

__all__ = ["main", "run"]

COMMANDS = (
    "list",
    "show",
    "runs",
    "train",
    "generate",
    "paint",
    "translate",
    "tag",
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
"""The files of the commands, in the order in which `manyformer --help` lists them."""

for _command in COMMANDS:
    importlib.import_module(f"manyformer.cli.{_command}")
