"""Count the graphs that `torch.compile` makes of a training step of each recipe, and say what they end at.

    python benchmarks/graph_counts.py llama gla    # count, and compare with what is kept
    python benchmarks/graph_counts.py --write      # all recipes that are not counted yet

A tiny model with dropout is trained for a step at each of three lengths, which are marked dynamic. Graphs are counted
as the compiler captures them, and run without code generation. The counts are kept in `graphs.json` of the package,
from which cards read them. The exit code is 1 if a recipe has another number of graphs than is kept.
"""

import argparse
import json
import sys
import time
import warnings
from typing import Any

import torch
from other_tools.subject import ROWS, Subject
from torch import Tensor

import manyformer as mf
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.config.graph_counts import GraphCount
from manyformer.config.shipped import COUNTED_GRAPHS
from manyformer.nn.runtime.torch_internals import tree_leaves
from manyformer.recipes.parts.registry import task_of

LENGTHS = (24, 33, 48)


class GraphRecorder:
    """A backend of `torch.compile` that counts graphs, notes what each ends at, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs = 0
        self.ends: dict[str, None] = {}

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        self.graphs += 1
        end = graph.compile_subgraph_reason
        if end is not None and end.graph_break:
            own = [frame for frame in end.user_stack if "manyformer" in frame.filename]
            place = f"{own[-1].name} ({own[-1].filename.rpartition('/')[2]})" if own else "an unknown place"
            self.ends[f"{place}: {end.reason.partition(chr(10))[0]}"] = None
        return graph.forward


def batch_of(subject: Subject, model: Any, length: int) -> Any:
    """A batch of the training loop."""
    task = task_of(model)
    inputs = subject.example(model, ROWS, length)
    return task.batch(model, inputs, task.random_targets(model, inputs, torch.Generator().manual_seed(1)))


def mark_lengths(batch: Any, other: Any) -> None:
    """Mark the sizes dynamic in which two batches differ."""
    for x, y in zip(tree_leaves(batch), tree_leaves(other)):
        if isinstance(x, Tensor):
            for axis in range(x.ndim):
                if x.shape[axis] != y.shape[axis]:
                    torch._dynamo.maybe_mark_dynamic(x, axis)


def count(recipe: str) -> GraphCount:
    """The graphs of a training step of a recipe, and those that further lengths add."""
    torch.compiler.reset()
    subject = Subject(recipe)
    keywords = {"dropout": 0.1} if subject.has_keyword("dropout") else {}
    model = subject.model(**keywords).train()
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder)
    lengths = LENGTHS[:1] if subject.fixed_length(model) else LENGTHS
    batches = [batch_of(subject, model, length) for length in lengths]
    first = 0
    for number, batch in enumerate(batches):
        mark_lengths(batch, batches[number - 1])
        loss = compiled(batch)
        (loss.total + loss.extra).backward()
        first = first or recorder.graphs
    return GraphCount(first, tuple(recorder.ends), recorder.graphs - first)


def main() -> int:
    """Count, keep or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="keep the counts")
    options = parser.parse_args()
    if unknown := sorted(set(options.recipes) - mf.recipes().keys()):
        parser.error(f"there is no recipe {', '.join(unknown)}")
    torch.set_num_threads(1)
    # torch's remarks on what it does not trace
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"torch": torch.__version__.partition("+")[0], "recipes": {}}
    if COUNTED_GRAPHS.is_file():
        record = json.loads(COUNTED_GRAPHS.read_text(encoding="utf-8"))
    changed = 0
    for name in options.recipes or sorted(mf.recipes().keys() - record["recipes"].keys()):
        start = time.process_time()
        counted = count(name)
        print(f"{name}: {counted.sentence()} ({time.process_time() - start:.1f} s)", flush=True)
        kept = record["recipes"].get(name)
        changed += kept is not None and kept["graphs"] != counted.graphs
        record["recipes"][name] = {"graphs": counted.graphs, "ends": list(counted.ends), "more": counted.more}
        if options.write:
            lines = ",\n".join(
                f"{json.dumps(n)}: {json.dumps(record['recipes'][n])}" for n in sorted(record["recipes"])
            )
            atomic_write_text(COUNTED_GRAPHS, f'{{"torch": "{record["torch"]}", "recipes": {{\n{lines}\n}}}}\n')
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
