"""What importing a checkpoint of transformers costs: seconds, and memory beyond that of the imported packages.

    python benchmarks/import_cost.py              # GPT-2 small and BERT base, random weights, one file and several
    python benchmarks/import_cost.py --only bert

Each import runs in a process of its own, on Linux, which tells the largest resident memory since a moment. The memory
of the packages that it needs is not counted. The goal is 10 s and 1.5 times the size of the weights.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS_GOAL, MEMORY_GOAL = 10.0, 1.5
MEGABYTE = 1e6


def save(name: str, folder: Path, shard: str) -> None:
    """Write a model of the published size with random weights."""
    import transformers

    makers = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig()),
    }
    makers[name]().save_pretrained(folder, max_shard_size=shard)


def measure(folder: str) -> None:
    """Import a folder, and print the seconds, the memory before and after, and the bytes of the weights."""
    # imported before the first reading, so that their memory is not counted
    import torch  # noqa: F401

    import manyformer.recipes  # noqa: F401
    from manyformer.conversion.hugging_face import import_model

    # the largest memory starts anew, because a process inherits that of the one that started it
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _memory("VmRSS"), time.perf_counter()
    model, _ = import_model(folder)
    seconds, after = time.perf_counter() - start, _memory("VmHWM")
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    print(json.dumps({"seconds": seconds, "before": before, "after": after, "size": size}))


def _memory(field: str) -> int:
    """The resident memory of this process in bytes: now (VmRSS), or its largest (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("gpt2", "bert"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child)
        return
    for name in [options.only] if options.only else ("gpt2", "bert"):
        for shard in ("5GB", "100MB"):
            with tempfile.TemporaryDirectory() as folder:
                save(name, Path(folder), shard)
                files = len(list(Path(folder).glob("*.safetensors")))
                child = [sys.executable, __file__, "--child", folder]
                cost = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
            extra = (cost["after"] - cost["before"]) / cost["size"]
            meets = cost["seconds"] <= SECONDS_GOAL and extra <= MEMORY_GOAL
            print(
                f"{name:5} {files} file(s)  weights {cost['size'] / MEGABYTE:.0f} MB  {cost['seconds']:.1f} s  "
                f"peak {cost['after'] / MEGABYTE:.0f} MB, imports {cost['before'] / MEGABYTE:.0f} MB, "
                f"difference {extra:.2f} x the weights  {'meets' if meets else 'misses'} the goal"
            )


if __name__ == "__main__":
    main()
