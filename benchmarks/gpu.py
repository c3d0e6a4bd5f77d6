"""All that only a GPU can show, in waves of a few minutes: correctness, compilation, speed, memory, contracts.

    python benchmarks/gpu.py --wave 1                 # on a GPU: what matters most, within six minutes
    python benchmarks/gpu.py --wave 1 2               # goes on with what is left and what failed
    python benchmarks/gpu.py --rehearse               # tiny sizes on any machine: tests the script alone
    python benchmarks/gpu.py --merge a.json b.json    # one page of several machines and days

Waves: {waves}.

Every finished item is kept in `gpu.json`, and `gpu.md` is written from it, what failed first. Items run in other
processes: one that crashes or hangs fails, and the next one goes on; comparisons share the GPU, timings are alone.
Numbers stand beside the path that computed them. From a checkout that is not installed, `PYTHONPATH=src` is enough.
The exit code is 1 if anything failed, 3 if nothing failed but something is left to be run.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import frame
import torch
from gpu_parts.kept_results import KeptItem, KeptResults, read_results
from gpu_parts.outcome import Outcome, Setting
from gpu_parts.page import page
from gpu_parts.waves import PARTS, WAVES, Wave, names_of
from gpu_parts.workers import Workers

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text

WAVE_MINUTES = 6.0
FAILED, INCOMPLETE = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of the waves within the time; returns the exit code."""
    waves = "; ".join(f"{number} {wave.purpose}" for number, wave in WAVES.items())
    parser = frame.argument_parser((__doc__ or "").replace("{waves}", waves))
    parser.add_argument("--wave", nargs="+", type=int, choices=list(WAVES), default=list(WAVES), help="[all]")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help="parts")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--minutes", type=float, default=WAVE_MINUTES, help="the most that a wave may take [6]")
    parser.add_argument("--out", default="gpu.json", help="where results are kept; the page has the suffix .md")
    parser.add_argument("--commit", help="the commit that is measured, where this folder is no checkout")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="RESULT", help="write the page of these, run nothing")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    if out.suffix != ".json":
        parser.error(f"--out ({out}) must end in .json")
    try:
        if options.merge:
            atomic_write_text(out.with_suffix(".md"), page([read_results(path) for path in options.merge], []))
            print(f"wrote {out.with_suffix('.md')}")
            return 0
        if not options.rehearse and not torch.cuda.is_available():
            parser.error("torch finds no GPU; --rehearse tests the script without one")
        setting = Setting(torch.device("cpu" if options.rehearse else "cuda"), options.rehearse)
        results = KeptResults(out, setting, options.commit)
    except UserError as error:
        parser.error(str(error))
    asked: list[str] = []
    for number in options.wave:
        wave = WAVES[number]
        names = [name for name in names_of(wave, setting) if name.partition("/")[0] in options.only]
        asked += names
        run_wave(setting, wave, results, results.remaining(names), time.monotonic() + 60 * options.minutes)
    return report(results, asked)


def run_wave(setting: Setting, wave: Wave, results: KeptResults, names: Sequence[str], end: float) -> None:
    """Run the items in order, as many at a time as the wave allows, and keep each at once."""
    side_by_side = wave.side_by_side if setting.on_gpu else 1
    remaining, lock = iter(names), threading.Lock()

    def work() -> None:
        with Workers(setting) as worker:
            while True:
                with lock:
                    name = next(remaining, None)
                left = end - time.monotonic()
                if name is None or left <= 0:
                    return
                limit = min(wave.item_seconds, left)
                item = worker.run(name, limit)
                if item is None and limit < wave.item_seconds:
                    # the wave's time is over: the item is left, it has not failed
                    return
                if item is None:
                    item = KeptItem.of(Outcome("failed", f"not finished after {limit:.0f} s"), limit)
                with lock:
                    results.add(name, item)
                    print(f"{item.seconds:6.1f} s {item.verdict:<7} {name}: {item.told}", flush=True)

    with few_threads(side_by_side), ThreadPoolExecutor(side_by_side) as pool:
        for future in [pool.submit(work) for _ in range(side_by_side)]:
            future.result()


@contextmanager
def few_threads(processes: int) -> Iterator[None]:
    """Share the cores between processes that are started from here."""
    share = str(max(1, (os.cpu_count() or 1) // processes))
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    before = {name: os.environ.get(name) for name in names}
    if processes > 1:
        os.environ.update(dict.fromkeys(names, share))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def report(results: KeptResults, names: Sequence[str]) -> int:
    """Write the page, list what failed, and return the exit code."""
    left = [name for name in names if name not in results.items]
    failed = {name: item for name, item in results.items.items() if item.verdict == "failed"}
    where = results.path.with_suffix(".md")
    atomic_write_text(where, page([results.as_machine()], left))
    print(f"\nwrote {results.path} and {where}")
    for name, item in failed.items():
        print(f"FAILED {name}: {item.sentence}")
    if left:
        print(f"{len(left)} of {len(names)} items are left: the same command goes on with them")
    return FAILED if failed else INCOMPLETE if left else 0


if __name__ == "__main__":
    sys.exit(main())
