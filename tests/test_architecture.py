"""Rules that matter, as tests: who may import whom, what is shared, what is public, what stays cheap."""

import ast
import dataclasses
import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.core import Context
from manyformer.recipes import RECIPES

ROOT = Path(mf.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LEVELS = [
    {"autocast", "binding", "compilation", "decoding_options", "dropout", "errors", "type_aliases", "version"},
    {"files", "spaces", "structures", "system"},
    {"core", "costs", "environments", "plugins", "recompute", "training_hooks"},
    {"batches", "context_windows", "head_selection", "length_norms", "state_tensors", "two_texts"},
    {"head_projection", "masks", "position", "residual", "rollouts"},
    {"multi_head"},
    {"ops"},
    {"kernels", "sources"},
    {"attention", "experts", "feedforward"},
    {"mixers", "depth"},
    {"models", "scores"},
    {"tasks"},
    {"recipes"},
    {"config"},
    {"data"},
    {"interop"},
    {"api", "model_summary", "properties", "relevance"},
    {"surgery"},
    {"generate"},
    {"train", "check"},
    {"evaluate", "view"},
    {"datastore", "exits", "heads", "training_worker"},
    {"pruning", "viewer"},
    {"bench"},
    {"compare", "planning"},
    {"cli"},
    {"__main__"},
]
"""Arrows point down only: a part imports from lower levels and from its own folder. The package itself is lazy."""

ONLY = {
    "config": {"errors", "files"},
    "data": {
        *(
            "batches",
            "config",
            "context_windows",
            "core",
            "environments",
            "errors",
            "files",
            "rollouts",
            "structures",
        ),
        *("spaces", "two_texts", "type_aliases", "version"),
    },
    "core": {"binding", "structures"},
    "files": {"errors", "version"},
    "environments": {"errors", "files", "spaces", "type_aliases"},
    "rollouts": {*("batches", "core", "environments", "errors", "files", "spaces", "state_tensors", "type_aliases")},
    "errors": set(),
}
"""Parts that must not know all that lies below them: a run's record and its data stand beside the models."""

HEAVY = {
    "PIL",
    "transformers",
    "datasets",
    "conllu",
    "matplotlib",
    "tensorboard",
    "wandb",
    "mlflow",
    "tensorly",
    "faiss",
    "sacrebleu",
    "babel",
    "huggingface_hub",
    "gymnasium",
    "torchrl",
    "minari",
    "soundfile",
    "scipy",
    "jiwer",
}

PUBLIC = {
    "Datastore",
    "TransferConfig",
    "build",
    "check",
    "collaborate",
    "convert",
    "draw",
    "early_exit",
    "explain",
    "generate",
    "knn_lm",
    "load",
    "memorize",
    "prune_heads",
    "recipes",
    "train",
    "view",
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file; the garbage collector of later tests does not look through them."""
    parsed = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    gc.collect()
    gc.freeze()
    return parsed


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules that are imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported: all but those in functions and under TYPE_CHECKING."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(ast.Module([node], []))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and those for type checkers count as well; those of a package's names do not."""
    names = {".".join(("manyformer", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES}

    def module_of(name: str) -> str | None:
        return name if name in names else module_of(name.rpartition(".")[0]) if "." in name else None

    graph = {
        ".".join(("manyformer", *file.relative_to(ROOT).with_suffix("").parts)): {
            module for name in imported(tree) if (module := module_of(name))
        }
        for file, tree in trees().items()
    }
    while leaves := {name for name, targets in graph.items() if not targets - {name}}:
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}
    assert not graph, f"circles among {sorted(graph)}"


def test_arrows_point_down() -> None:
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts <= set(level), f"parts without a place in the house: give a level to {sorted(parts - set(level))}"
    offences = []
    for file, tree in trees().items():
        if (importer := part_of(file)) == "__init__":
            continue
        for name in imported(tree):
            package, part, *_ = (*name.split("."), "")
            if package != "manyformer" or part in (importer, "__version__"):
                continue
            if level[part] >= level[importer]:
                offences.append(f"{file.relative_to(ROOT)} must not import {name}")
            if part not in ONLY.get(importer, set(level)):
                offences.append(f"{file.relative_to(ROOT)} must not know of {name}")
    assert offences == []


def test_heavy_packages_wait_until_they_are_needed() -> None:
    offences = []
    for file, tree in trees().items():
        loaded = {name.split(".")[0] for name in at_import_time(tree)}
        # its classes are subclasses of those of transformers; nothing else imports it
        allowed = {"transformers"} if file.parent == ROOT / "interop" / "auto_model" else set()
        # with `__future__`, shape annotations would be strings
        early = loaded & ((HEAVY | {"__future__"}) - allowed)
        offences += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(early)]
    assert offences == []


@pytest.mark.parametrize("names", ["", ".errors", ".config", ".cli"])
def test_help_and_mistakes_do_not_wait_for_torch(names: str) -> None:
    code = f"import sys, manyformer{names}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_added_to_what_a_call_shares() -> None:
    assert [field.name for field in dataclasses.fields(Context)] == ["positions", "memory", "watch"]
    assert Context.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_public_names() -> None:
    assert set(mf.__all__) == PUBLIC | {"__version__"}
    for name in PUBLIC:
        assert callable(getattr(mf, name)), name
        assert getattr(mf, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'manyformer' has no attribute 'biuld'"):
        mf.biuld  # noqa: B018


def test_each_file_of_recipes_defines_one_or_helps_those_that_do() -> None:
    folder = ROOT / "recipes"
    names = {file: set(imported(tree)) for file, tree in trees().items()}
    for file in sorted(folder.glob("[!_]*.py")):
        module = f"manyformer.recipes.{file.stem}"
        is_helper = any(name.startswith(f"{module}.") for user, used in names.items() if user != file for name in used)
        assert is_helper or any(recipe.module == module for recipe in RECIPES.values()), f"{file.name} has no recipe"


TASK_CLASSES = {
    *("LanguageModel", "EncoderDecoder", "MaskedLM", "TextClassifier", "Tagger", "ImageClassifier"),
    *("CausalLMBatch", "Seq2SeqBatch", "MaskedLMBatch", "ClassificationBatch", "TaggingBatch"),
    *("ImageClassificationBatch", "TextData", "PairsData", "LabelsData", "SyntheticData", "TreesData", "ImagesData"),
}
"""The classes of models, batches and data sections."""

MAY_ASK_FOR_CLASSES = {"models", "batches", "tasks", "config", "data"}

CLASS_CHECKS = {
    "datastore/build_job.py": 2,
    "datastore/context_keys.py": 2,
    "datastore/knn_head.py": 1,
    "datastore/retrieval_model.py": 2,
    "datastore/tuning.py": 1,
    "evaluate/held_out_images.py": 4,
    "exits/prompts_from_run.py": 1,
    "surgery/knn_memory.py": 1,
    "view/region_masses.py": 1,
    "view/token_work.py": 1,
}
"""The number of remaining checks of a class in each file."""


def test_tasks_are_asked_instead_of_classes() -> None:
    """A new kind of model, batch or data must not need a change in any command."""
    counts = {}
    for file, tree in trees().items():
        path = file.relative_to(ROOT)
        if path.parts[0] not in MAY_ASK_FOR_CLASSES and (count := _class_checks(tree)):
            counts[path.as_posix()] = count
    assert counts == CLASS_CHECKS


def _class_checks(tree: ast.Module) -> int:
    """The number of `isinstance` calls and `case` patterns that name one of `TASK_CLASSES`."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            named = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            named = {node.cls.id}
        else:
            continue
        count += bool(named & TASK_CLASSES)
    return count
