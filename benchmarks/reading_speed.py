"""The speed of the readers of text, TSV, CSV and JSONL: processor time of a pass over a generated file.

    python benchmarks/reading_speed.py --megabytes 1000
    python benchmarks/reading_speed.py --megabytes 200 --rounds 5 --against ../earlier/src

Every pass is a process of its own, which reports its processor time after its imports. With `--against`, the sources of
another checkout read the same files, in turns with ours, and the ratio of the medians is printed.
"""

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
KINDS = ("txt", "tsv", "csv", "jsonl")
WORDS = [
    *("red", "cat", "blue", "dog", "eats", "runs", "the", "of", "a", "quick", "brown"),
    *("fox,", "who", "said", '"no"', "über", "日本", "isn't"),
]
LABELS = ("positive", "negative", "none")
PASS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from manyformer.data.text.table_files import read_rows
from manyformer.data.text.text_sources import text_sources
path = Path(sys.argv[2])
start = time.process_time()
if path.suffix == ".txt":
    size = sum(len(part.text) for source in text_sources(str(path), None, path.parent) for part in source.parts())
else:
    columns = ["text", "label"] if path.suffix == ".jsonl" else [0, 1]
    size = sum(len(row.cells[0]) + len(row.cells[1]) for row in read_rows(path, columns))
print(time.process_time() - start, size)
"""


def rows(megabytes: float) -> Iterator[tuple[str, str]]:
    """Texts of 3 to 30 words with labels, of about so many megabytes together."""
    draw, size = random.Random(0), 0
    for _ in count():
        text = " ".join(draw.choices(WORDS, k=draw.randint(3, 30)))
        yield text, draw.choice(LABELS)
        size += len(text) + 9
        if size > megabytes * 1e6:
            return


def write(path: Path, megabytes: float) -> None:
    """Write a file of the kind that its suffix says."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file, lineterminator="\n").writerows(rows(megabytes))
            return
        for text, label in rows(megabytes):
            line = {
                ".txt": text,
                ".tsv": f"{text}\t{label}",
                ".jsonl": json.dumps({"text": text, "label": label}, ensure_ascii=False),
            }[path.suffix]
            file.write(f"{line}\n")


def seconds(sources: Path, path: Path) -> tuple[float, int]:
    """The processor time of a pass over a file, and the characters that it read."""
    command = [sys.executable, "-c", PASS, str(sources.resolve()), str(path)]
    elapsed, size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(elapsed), int(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200, help="the size of each file")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each reader")
    parser.add_argument("--against", type=Path, help="the folder `src` of another checkout")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    checkouts = [SOURCES, *([options.against] if options.against else [])]
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"file.{kind}")
            write(path, options.megabytes)
            times: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
            sizes = set()
            for _ in range(options.rounds):
                for checkout in checkouts:
                    elapsed, size = seconds(checkout, path)
                    times[checkout].append(elapsed)
                    sizes.add(size)
            megabytes = path.stat().st_size / 1e6
            medians = [statistics.median(values) for values in times.values()]
            shown = f"{kind:<6} {megabytes:,.0f} MB  {medians[0]:.2f} s  {megabytes / medians[0]:,.0f} MB/s"
            ratio = f"  {medians[0] / medians[1]:.2f} of the other's {medians[1]:.2f} s" if options.against else ""
            told = "" if len(sizes) == 1 else "  (they read different texts)"
            print(f"{shown}{ratio}{told}", flush=True)


if __name__ == "__main__":
    main()
