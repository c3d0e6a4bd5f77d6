"""List where the library asks a module for its class outside the folder that defines the class.

    python benchmarks/layer_checks.py                # the number, and each place with its class
    python benchmarks/layer_checks.py --by folder    # how many each folder has; also: class
    python benchmarks/layer_checks.py --source ../before/src

Counted is `isinstance(x, C)`, also as `A | B` and in tuples, where C is a class of this library below `nn.Module`: a
layer, kernel, position, source, head or model. Who asks that must be changed with every new class; a method or an
attribute of the object would answer instead. Nothing is imported: classes are read from the files. `REASONS` says of
each file why it still asks; a file without a reason is listed at the end.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MODULE = "nn.Module"
RUNTIME = Path("nn", "runtime")

AT_THE_DOOR = "one check where a model comes in, with the sentence for its user; all behind it has the type"
PARTS = "it is written for these parts alone, and refuses others when it is built"
BOUND = "the one file of bound steps knows the layers that it binds, and calls the others by forward"
STRUCTURE = "it maps the parts of one model to those of another, which is about their classes"
GENERATES = "not every model generates: the base class of those that do has the methods"

REASONS = {
    "conversion/__init__.py": GENERATES,
    "nn/decoding/acting_step.py": BOUND,
    "nn/decoding/bound_step.py": BOUND,
    "analysis/own_models.py": AT_THE_DOOR,
    "nn/depth/adaptive.py": PARTS,
    "nn/depth/early_exit_stack.py": "steps of rows that go on are made of the parts of a layer's step",
    "nn/depth/token_subset.py": PARTS,
    "nn/depth/reversible.py": PARTS,
    "nn/depth/universal.py": PARTS,
    "conversion/hugging_face/exported_config.py": GENERATES,
    "nn/attention/collaborative_attention.py": STRUCTURE,
    "nn/attention/compressive_attention.py": PARTS,
    "inference/datastore/context_keys.py": "the keys of kNN-LM are the inputs of the last feed-forward layer",
    "models/encoder_model.py": "what the body and the embedding read decides which inputs the model takes",
    "models/generative_model.py": "an early exit and its classifiers are one step together",
    "models/with_early_exit.py": PARTS,
    "recipes/parts/baselines.py": "initialization is by kind of layer",
    "analysis/heads/relevance.py": "rules are by kind of operation, and relevance begins where a source is embedded",
    "conversion/surgery/attention_transfer.py": STRUCTURE,
    "conversion/surgery/head_sharing.py": STRUCTURE,
    "conversion/surgery/lora.py": STRUCTURE,
    "conversion/surgery/weight_transfer.py": STRUCTURE,
    "models/tasks/masked_language_modelling.py": "the head of masked tokens is the one that the encoder has",
    "models/tasks/task.py": GENERATES,
    "models/tasks/text_labels.py": "why a model fails a contract is a fact of its layers",
    "analysis/viewer/model_view.py": "one head reads a datastore",
}
"""Why each file still asks."""


class ClassFile(NamedTuple):
    """Where a class is defined, and the names of its bases."""

    file: Path
    bases: tuple[str, ...]


class LayerCheck(NamedTuple):
    """A place that asks for a class from another folder."""

    file: Path
    line: int
    name: str
    home: Path

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name} of {self.home}"


def main(words: list[str] | None = None) -> int:
    """Print the places and their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the folder with the package [src]")
    parser.add_argument("--by", choices=("folder", "class"), help="numbers instead of places")
    options = parser.parse_args(words)
    found = layer_checks(options.source / "manyformer")
    if options.by == "folder":
        print_counts(Counter(str(check.file.parent) for check in found))
    elif options.by == "class":
        print_counts(Counter(check.name for check in found))
    else:
        for check in found:
            print(f"{check} ({REASONS.get(str(check.file), 'no reason yet')})")
    print(f"{len(found)} checks of a module's class outside its folder")
    if unexplained := sorted({str(check.file) for check in found} - REASONS.keys()):
        print(f"without a reason: {', '.join(unexplained)}")
    return 0


def print_counts(counts: Counter[str]) -> None:
    """One line each, the largest first."""
    for name, number in counts.most_common():
        print(f"{number:4} {name}")


def layer_checks(package: Path) -> list[LayerCheck]:
    """The places in the order of the files."""
    trees = {
        path.relative_to(package): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))
    }
    classes = dict(_classes(trees))
    modules = {name for name in classes if _is_module(name, classes)}
    return [
        LayerCheck(file, line, name, classes[name].file)
        for file, tree in trees.items()
        for line, name in _asked_classes(tree)
        if name in modules
        and classes[name].file.parent not in (file.parent, *file.parent.parents)
        # interfaces that all rooms have in common, as if they stood above them
        and not classes[name].file.is_relative_to(RUNTIME)
        and classes[name].file.parent.name != "nn"
    ]


def _classes(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, ClassFile]]:
    """All classes by name, which is the name of one class alone."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield node.name, ClassFile(file, tuple(_name(base) for base in node.bases))


def _is_module(name: str, classes: dict[str, ClassFile]) -> bool:
    if name == MODULE:
        return True
    return name in classes and any(_is_module(base, classes) for base in classes[name].bases if base != name)


def _asked_classes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the class of every `isinstance`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from ((node.lineno, name) for name in _alternatives(node.args[1]))


def _alternatives(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Tuple):
        for element in node.elts:
            yield from _alternatives(element)
    else:
        yield _name(node)


def _name(node: ast.expr) -> str:
    """A class as it is written, without its type parameters; only `nn.Module` keeps its module's name."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return MODULE if node.attr == "Module" else node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
