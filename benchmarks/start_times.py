"""How long commands take from the shell to their answer: seconds of the processor and of the wall, least of several.

    python benchmarks/start_times.py --out docs/start_times.json

The commands are run in turns, each in a new process with one thread, so that other load on the machine affects all of
them; `python -c pass` and `import torch` are measured beside them. The goal is 1 s where torch is not needed and 2.5 s
where it is."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": False,
    "python -c 'import torch'": True,
    "manyformer --version": False,
    "manyformer list": False,
    "manyformer list --task translation": False,
    "manyformer runs": False,
    "manyformer runs show lm/stdlib": False,
    "manyformer train --help": False,
    "manyformer floors --help": False,
    "manyformer compare": False,
    "manyformer advise --length 2000 --task masked-lm": False,
    "manyformer advise --length 2000": False,
    "python -c 'import manyformer'": False,
    "python -c 'from manyformer import build'": True,
    "python -c 'import manyformer as mf; mf.build(\"transformer-lm\", vocab=256)'": True,
    "manyformer generate --help": False,
    "manyformer check --help": False,
    "manyformer evaluate --help": False,
    "manyformer export --help": False,
    "manyformer convert --help": False,
    "manyformer compare --help": False,
    "manyformer bench --help": False,
    "manyformer view --help": False,
    "manyformer doctor --help": False,
    "manyformer check transformer-lm --only causal": True,
    "manyformer show gpt2": True,
    "manyformer plan transformer-lm": True,
    "manyformer train lm/stdlib --dry-run": True,
}
"""The commands, and whether they need torch."""


def measure(command: str) -> tuple[float, float]:
    """The seconds of the processor and of the wall that a command takes."""
    words = [sys.executable, *(["-m"] if command.startswith("manyformer") else [])]
    if command.startswith("manyformer"):
        words += command.split()
    else:
        words += ["-c", command.partition("-c ")[2].strip("'")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    processor: dict[str, list[float]] = {command: [] for command in COMMANDS}
    wall: dict[str, list[float]] = {command: [] for command in COMMANDS}
    for _ in range(options.rounds):
        for command in COMMANDS:
            seconds = measure(command)
            processor[command].append(seconds[0])
            wall[command].append(seconds[1])
    rows = [
        {
            "command": command,
            "needs_torch": needs_torch,
            "processor": round(min(processor[command]), 2),
            "wall": round(min(wall[command]), 2),
        }
        for command, needs_torch in COMMANDS.items()
    ]
    for row in rows:
        print(f"{row['command']:52} {row['processor']:6.2f} s processor {row['wall']:6.2f} s wall")
    if options.out:
        record = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
        record |= {"python": platform.python_version(), "rounds": options.rounds, "commands": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
