"""Rules that matter, as tests: who may import whom, what is shared, what is public, what stays cheap."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.nn.core import Context
from manyformer.recipes import RECIPES
from sources import trees_below

ROOT = Path(mf.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LEVELS = [
    {"base"},
    {"config"},
    {"nn"},
    {"models"},
    {"data"},
    {"recipes"},
    {"conversion"},
    {"training"},
    {"inference"},
    {"analysis"},
    {"cli"},
    {"__main__"},
]
"""The wings. Arrows point down: a wing imports from lower ones and from its own rooms. The package itself is lazy."""

ONLY = {
    "config": {"base"},
    "nn": {"base"},
    "models": {"base", "config", "nn"},
    "data": {"base", "config", "nn"},
    "recipes": {"base", "config", "nn", "models"},
}
"""Wings that must not know all that lies below them: layers know no settings, and data and models not each other."""

NN_LEVELS = [
    {"model_inputs"},
    {"core", "runtime", "structures"},
    {"batches", "feed_forward", "masks", "positions", "residual"},
    {"attention.kv_cache", "ops"},
    {"convolution", "graphs", "kernels", "streams"},
    {"clustered", "linear", "low_rank", "softmax"},
    {"attention", "sparse"},
    {"decoding", "recurrent", "token_mixing"},
    {"depth"},
]
"""The rooms of `nn` from the lowest, as prefixes of module names: one imports from lower rooms and its own modules."""

NN_OF_DATA = {"batches", "core", "runtime", "structures"}
"""The rooms of `nn` that data may know: what batches are made of, and what runs them, but no layers."""

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
    "advise",
    "build",
    "check",
    "check_data",
    "check_scorer",
    "collaborate",
    "compare",
    "convert",
    "denoise",
    "draw",
    "early_exit",
    "evaluate",
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


def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file."""
    return trees_below(ROOT)


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


def nn_room(module: str) -> str:
    """The room of a module of `nn`, by the longest prefix in `NN_LEVELS`."""
    parts = module.removeprefix("manyformer.nn.").split(".")
    rooms = set().union(*NN_LEVELS)
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in rooms), "")


def test_arrows_between_rooms_of_layers_point_down() -> None:
    level = {room: number for number, rooms in enumerate(NN_LEVELS) for room in rooms}
    offences = []
    for file, tree in trees().items():
        module = ".".join(("manyformer", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        if part_of(file) not in ("nn", "data") or module == "manyformer.nn":
            continue
        importer = nn_room(module) if part_of(file) == "nn" else ""
        assert importer or part_of(file) == "data", f"give a level to the room of {module}"
        for name in imported(tree):
            if not name.startswith("manyformer.nn."):
                continue
            room = nn_room(name)
            if importer and room != importer and level[room] >= level[importer]:
                offences.append(f"{file.relative_to(ROOT)} must not import {name}")
            if not importer and room not in NN_OF_DATA:
                offences.append(f"{file.relative_to(ROOT)} must not know of {name}")
    assert offences == []


def test_heavy_packages_wait_until_they_are_needed() -> None:
    offences = []
    for file, tree in trees().items():
        loaded = {name.split(".")[0] for name in at_import_time(tree)}
        # its classes are subclasses of those of transformers; nothing else imports it
        allowed = {"transformers"} if file.parent == ROOT / "conversion" / "hugging_face" / "auto_model" else set()
        # with `__future__`, shape annotations would be strings, which nothing checks; contracts run without jaxtyping
        if file.parent == ROOT / "analysis" / "contracts" or file == ROOT / "nn" / "model_inputs.py":
            allowed = {"__future__"}
        early = loaded & ((HEAVY | {"__future__"}) - allowed)
        offences += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(early)]
    assert offences == []


BEHIND_THE_DOOR = {"transformers", "peft", "datasets", "huggingface_hub"}
"""Libraries that run code, ask questions or use the network unless they are told not to."""

BESIDE_THE_DOOR = {
    "conversion/hugging_face/auto_model/": "subclasses of classes of transformers, which programs of users call",
    "data/trajectories/episode_archives.py": "load_dataset of minari, which reads data sets that are installed",
}
"""The other places that may call these libraries, or have calls of that name, and why."""

LOADERS = {
    *("from_pretrained", "load_dataset", "load_from_disk", "snapshot_download", "hf_hub_download", "create_repo"),
    *("Tokenizer.from_file", "Tokenizer.from_str", "Tokenizer.from_buffer"),
}
"""The calls by which these libraries and `tokenizers` read what somebody else has written, or send something."""


LAST_NAMES = {loader.rpartition(".")[2] for loader in LOADERS}


def last_name(function: ast.expr) -> str:
    """The last part of what is called: "from_file" of `Tokenizer.from_file(path)`."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def test_libraries_of_hugging_face_are_called_through_one_door() -> None:
    """There remote code and the network are off, and nothing but a command reads standard input."""
    offences = []
    for file, tree in trees().items():
        path = file.relative_to(ROOT).as_posix()
        if path.startswith(("base/libraries/", *BESIDE_THE_DOOR)):
            continue
        packages = {name.split(".")[0] for name in imported(tree)}
        offences += [f"{path} imports {name}" for name in sorted(packages & BEHIND_THE_DOOR)]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            # calls of other names are not written down, which takes longer than all else here
            if last_name(call.func) not in LAST_NAMES:
                continue
            called = ast.unparse(call.func)
            if any(called == loader or called.endswith(f".{loader}") for loader in LOADERS):
                offences.append(f"{path} calls {called}, which the modules of libraries/ do")
    assert offences == []


@pytest.mark.parametrize("name", ["", ".config", ".cli", ".cli.training_worker", ".analysis.contracts.pytest_plugin"])
def test_help_and_mistakes_do_not_wait_for_torch(name: str) -> None:
    code = f"import sys, manyformer{name}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_of_the_base_needs_torch() -> None:
    code = """
import importlib, pkgutil, sys
import manyformer.base as base
for module in pkgutil.walk_packages(base.__path__, "manyformer.base."):
    importlib.import_module(module.name)
    assert "torch" not in sys.modules, module.name
"""
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


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

MAY_ASK_FOR_CLASSES = {"models", "nn", "config", "data"}

CLASS_CHECKS = {
    "inference/datastore/build_datastore.py": 1,
    "inference/datastore/tuning.py": 1,
    "inference/evaluate/eval_data.py": 4,
    "inference/early_exit/prompts_from_run.py": 1,
    "analysis/figures/region_masses.py": 1,
    "analysis/figures/token_work.py": 1,
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


WRITERS = {"atomic_write", "atomic_path"}
"""What gives a draft to write, which is checked, forced to disk, given its rights and renamed."""

WRITING_METHODS = {"write_text", "write_bytes", "mkdir", "makedirs", "rename", "symlink_to", "hardlink_to", "touch"}
WRITING_METHODS |= {"save_file", "save_model", "savefig", "save", "savez", "savez_compressed", "tofile", "write_index"}
WRITING_METHODS |= {"copyfile", "copy2", "copytree", "move", "dump", "SummaryWriter"}

WRITTEN_ELSEWHERE = {
    # methods of the library itself, which write by `atomic_files`
    "analysis/own_models.py": ["save"],
    "cli/convert.py": ["save"],
    "cli/view.py": ["save"],
    "data/pipeline/opened.py": ["save"],
    "inference/datastore/build_datastore.py": ["write_text"] * 2,
    "data/tokenizers/saved_tokenizers.py": ["save"] * 3,
    "data/text/text_preparation.py": ["save"],
    "conversion/hugging_face/model_import.py": ["save"] * 2,
    "training/init_from.py": ["save"],
    "training/session.py": ["save"],
    # contracts need torch and NumPy alone, the writer safetensors; the same command writes the page again
    "analysis/contracts/check_report.py": ["write_text"],
    # a text, not a file
    "config/run_file.py": ["dump"],
    # a draft folder that becomes the complete one, and one that is set aside
    "models/model_files.py": ["mkdir", "rename", "rename", "rename"],
    "training/checkpoints.py": ["rename"] * 3,
    "training/run_folder.py": ["rename"],
    # tokenizers, and a lock, whose content nobody reads
    "data/storage/cache_folder.py": ["open", "save"],
    # the pipe of a process of the same run, and a switch of the system
    "cli/training_worker.py": ["open"],
    "analysis/benchmarks/measuring.py": ["write_text"],
    # torch's and TensorBoard's own formats, of which a kill may leave a part that is not read
    "training/sharded_checkpoints.py": ["save"],
    "training/metrics.py": ["SummaryWriter"],
}
"""The calls that write outside of `base/files/atomic_files.py`, each of which was looked at."""


def test_everything_is_written_by_one_writer() -> None:
    """Its files are whole, have the rights of the user's mask, and are named when they cannot be written."""
    found = {}
    for file, tree in trees().items():
        if file != ROOT / "base" / "files" / "atomic_files.py" and (
            calls := sorted(_writing_calls(tree, in_draft=False))
        ):
            found[file.relative_to(ROOT).as_posix()] = calls
    assert found == WRITTEN_ELSEWHERE


def _writing_calls(node: ast.AST, *, in_draft: bool) -> Iterator[str]:
    """The names of calls that write a file or a folder, but not those to the draft of a writer."""
    if isinstance(node, ast.With):
        names = {item.context_expr.func.id for item in node.items if _is_plain_call(item.context_expr)}  # type: ignore[attr-defined]
        in_draft = in_draft or bool(names & WRITERS)
    if isinstance(node, ast.Call) and not in_draft:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in WRITING_METHODS or (name == "open" and _opens_for_writing(node)):
            yield name
    for child in ast.iter_child_nodes(node):
        yield from _writing_calls(child, in_draft=in_draft)


def _is_plain_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _opens_for_writing(call: ast.Call) -> bool:
    """Whether one of the arguments is a mode that writes, such as "wb" or "r+"."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = (value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))
    return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)


def test_no_process_is_forked() -> None:
    """A fork copies the locks of other threads as they are held: torch's may stay locked forever."""
    offences = []
    for file, tree in trees().items():
        # few files have any of these words, and writing down a tree takes longer than reading it
        if not re.search("fork|preexec_fn|multiprocessing|Pool", file.read_text(encoding="utf-8")):
            continue
        source = ast.unparse(tree)
        offences += [f"{file.name} calls {name}" for name in ("os.fork(", "preexec_fn=") if name in source]
        if "multiprocessing.get_context" in source:
            assert "get_context('spawn')" in source
        elif "ProcessPoolExecutor(" in source or "multiprocessing.Process(" in source or ".Pool(" in source:
            offences.append(f"{file.name} starts processes by the default of the system")
    assert offences == []
