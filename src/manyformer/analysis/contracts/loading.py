"""The model that a command line names: a name in a file or module, a folder of transformers, or a saved program.

Importing a file runs its code, as running it would. Nothing is unpickled: files of weights are read as weights alone,
and programs of TorchScript, which are code, by torch's own reader.
"""

import ast
import importlib.util
import inspect
import os
import typing
import zipfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from manyformer.analysis.contracts.constructors import Built, build_from_names, needs_of
from manyformer.analysis.contracts.importing import (
    Imported,
    import_file,
    import_module,
    main_guarded_names,
    run_user_code,
    user_code,
)
from manyformer.analysis.contracts.subject import Adapter, Subject
from manyformer.base.errors import UserError, list_names, suggest_names
from manyformer.base.libraries import has_weights, load_stranger_model

ARCHIVES = (".pt", ".pth", ".pt2", ".ts", ".ptl", ".bin", ".safetensors", ".ckpt")
"""How the names of saved programs and weights end."""

FACTORY_NAMES = ("model", "build", "build_model", "make_model", "create_model", "get_model", "make", "create", "tiny")

OPTION_NAMES = {"vocab": "vocabulary", "vocabulary": "vocabulary", "max_length": "max_length", "causal": "causal"}
"""What a factory may give beside the module, and the keyword of `check` that it is."""

HOW_TO_NAME = "name it as in model.py:GPT"


@dataclass(frozen=True)
class LoadedModel:
    """A model, adapter or subject, with sentences about how it was built, and options of `check` that it came with."""

    model: nn.Module | Adapter | Subject
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def load_named(name: str, given: Mapping[str, str] | None = None) -> LoadedModel:
    """The model that `name` names, built with the `given` values of its constructor. Raises UserError.

    `name` is FILE.py:NAME, FILE.py, MODULE:NAME, the folder of a Hugging Face model, or a file of TorchScript or of an
    exported program. NAME is a module, an adapter, a class, or a function that gives one of these, alone or with
    options.
    """
    given = given or {}
    path = Path(name)
    if path.is_dir():
        _refuse_given(given, name)
        return load_folder(path)
    if path.suffix in ARCHIVES and path.exists():
        _refuse_given(given, name)
        return load_archive(path)
    source, attribute = split_name(name)
    return _load_attribute(_import_source(source, attribute), attribute, source, given)


def split_name(name: str) -> tuple[str, str | None]:
    """The file or module of a name, and the name in it. Raises UserError."""
    source, colon, attribute = name.rpartition(":")
    # a drive of Windows is no name
    if not colon or "/" in attribute or "\\" in attribute:
        return name, None
    if not attribute or not all(part.isidentifier() for part in attribute.split(".")):
        raise UserError(f"'{attribute}' is no name in a file; {HOW_TO_NAME}")
    if not source:
        raise UserError(f"'{name}' names no file; {HOW_TO_NAME}")
    return source, attribute


def _existing_file(source: str, attribute: str | None) -> Path:
    path = Path(source)
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("[!_]*.py"))
        example = f"{files[0]}:{attribute or 'GPT'}" if files else HOW_TO_NAME
        raise UserError(f"{source} is a folder; name the file in it, as in {example}")
    if not path.exists():
        near = path.parent if path.parent.is_dir() else Path()
        files = sorted(str(file) for file in near.glob("*.py"))
        hint = suggest_names(source, files) if files else f"there is no Python file in {near.resolve()}"
        raise UserError(f"there is no file {source}; {hint}")
    if path.suffix != ".py":
        raise UserError(f"{source} is no Python file; {HOW_TO_NAME}")
    return path


def _refuse_given(given: Mapping[str, str], name: str) -> None:
    for key, value in given.items():
        raise UserError(f"{key}={value} is for a class or a function; the model in {name} is built already")


def _load_attribute(imported: Imported, attribute: str | None, source: str, given: Mapping[str, str]) -> LoadedModel:
    module = imported.module
    if attribute is None:
        attribute = _only_model(module, source)
    value = _named_value(module, attribute, source)
    root = Path(module.__file__ or ".").resolve().parent
    loaded = _resolve_model(value, attribute, root, given)
    return LoadedModel(loaded.model, (*imported.notes, *loaded.notes), loaded.options)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that FILE.py:NAME or MODULE:NAME names, or an object of the class of that name. Raises UserError."""
    source, attribute = split_name(reference)
    if attribute is None:
        raise UserError(f"'{reference}' names no function; give FILE.py:NAME")
    module = _import_source(source, attribute).module
    value = _named_value(module, attribute, source)
    if isinstance(value, type):
        # an object that can be called may keep its model as an attribute
        value = run_user_code(value, f"building {attribute}", Path(source).resolve().parent)
    if not callable(value):
        raise UserError(f"{reference} is a {type(value).__name__}, and no function")
    return value  # type: ignore[no-any-return]


def _import_source(source: str, attribute: str | None) -> Imported:
    if source.endswith(".py") or os.sep in source:
        return import_file(_existing_file(source, attribute))
    return import_module(source)


def _named_value(module: ModuleType, attribute: str, source: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UserError(_unknown_name(module, value, part, source))
        value = getattr(value, part)
    return value


def _resolve_model(value: Any, label: str, root: Path, given: Mapping[str, str]) -> LoadedModel:
    """The model of a value: itself, or what calling it gives."""
    if isinstance(value, nn.Module | Adapter):
        _refuse_given(given, label)
        return LoadedModel(_placed(value, label))
    if not callable(value):
        return _model_of_result(value, label, "is")
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise UserError(f"{label} is a class, but no nn.Module: name the model's class, or a function that builds it")
    doing = f"building {label}" if isinstance(value, type) else f"calling {label}"
    built: Built = build_from_names(value, given, label, lambda call: run_user_code(call, doing, root))
    loaded = _model_of_result(built.value, label, "gives")
    return LoadedModel(loaded.model, built.notes, loaded.options)


def _model_of_result(value: Any, label: str, verb: str) -> LoadedModel:
    """A module or adapter, alone or with options. Raises UserError for anything else."""
    options: dict[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, given_options = value
        for name, option in given_options.items():
            if name not in OPTION_NAMES:
                raise UserError(f"{label} {verb} the option '{name}'; {suggest_names(str(name), OPTION_NAMES)}")
            options[OPTION_NAMES[name]] = option
    value = _own_adapter(value)
    if isinstance(value, nn.Module | Adapter):
        return LoadedModel(_placed(value, label), (), options)
    kind = "nothing" if value is None else f"a {type(value).__name__}"
    raise UserError(
        f"{label} {verb} {kind}; it must be an nn.Module, an Adapter or (module, options), or a function or class "
        "that gives one"
    )


def _own_adapter(value: Any) -> Any:
    """An adapter of the other package of the checks, which may be installed beside this one, as one of ours."""
    names = [item.name for item in fields(value)] if is_dataclass(value) and not isinstance(value, type) else []
    if type(value).__name__ != "Adapter" or names != [item.name for item in fields(Adapter)]:
        return value
    return Adapter(**{name: getattr(value, name) for name in names})


def _placed(model: nn.Module | Adapter, label: str) -> nn.Module | Adapter:
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{label} has parameters on the device 'meta', without numbers: build it on the CPU")
    return model


def model_names(module: ModuleType) -> dict[str, str]:
    """Names of a file that may be models, with what they are: its instances, its factories, and its classes."""
    instances: dict[str, str] = {}
    factories: dict[str, str] = {}
    classes: dict[str, str] = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, nn.Module | Adapter):
            instances[name] = f"a {type(value).__name__}"
        elif isinstance(value, type) and issubclass(value, nn.Module) and own:
            classes[name] = "class"
        elif inspect.isfunction(value) and own and _gives_model(name, value):
            factories[name] = "function"
    return instances | factories | _outer_first(module, classes)


def _gives_model(name: str, function: Callable[..., Any]) -> bool:
    """Whether a function needs no arguments and, by its annotation or name, gives a model."""
    if any(need.required for need in needs_of(function)):
        return False
    try:
        given = typing.get_type_hints(function).get("return")
    # whatever an annotation raises, the name still says enough
    except Exception:
        given = None
    return name in FACTORY_NAMES or (isinstance(given, type) and issubclass(given, nn.Module | Adapter))


def _outer_first(module: ModuleType, classes: Mapping[str, str]) -> dict[str, str]:
    """Classes that no other class of the file uses before those that are parts of others."""
    used: set[str] = set()
    try:
        tree = ast.parse(Path(module.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return dict(classes)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            used |= names - {node.name}
    return dict(sorted(classes.items(), key=lambda item: item[0] in used))


def _only_model(module: ModuleType, source: str) -> str:
    """The one model of a file, if a name was left out. Raises UserError with all of them."""
    names = model_names(module)
    if len(names) == 1:
        return next(iter(names))
    if not names:
        hidden = sorted(main_guarded_names(module))
        hint = f"; {list_names(hidden)} is made only under `if __name__ == '__main__':`" if hidden else ""
        raise UserError(f"{source} has no nn.Module, no class of one and no function that gives one{hint}")
    raise UserError(
        f"{source} has {len(names)} models; name one, as in {source}:{next(iter(names))}: {list_names(names)}"
    )


def _unknown_name(module: ModuleType, holder: Any, name: str, source: str) -> str:
    if holder is module and name in main_guarded_names(module):
        return (
            f"'{name}' is made under `if __name__ == '__main__':` in {source}, which does not run when it is imported; "
            "make it in a function, and name that"
        )
    known = list(model_names(module)) if holder is module else []
    for key, value in vars(holder).items():
        # not what the file imports
        if not key.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__:
            known.append(key)
    if not known:
        return f"there is no '{name}' in {source}, which defines no model"
    return f"there is no '{name}' in {source}; {suggest_names(name, set(known))}"


def load_folder(folder: Path) -> LoadedModel:
    """The Hugging Face model in a folder, with random weights if it has none. Raises UserError."""
    if not (folder / "config.json").is_file():
        files = sorted(str(file) for file in folder.glob("[!_]*.py"))
        hint = f"name a file, as in {files[0]}:GPT" if files else "name a file, as in model.py:GPT"
        raise UserError(f"{folder} has no config.json, so it is no Hugging Face model; {hint}")
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{folder} is a Hugging Face model, which needs transformers: pip install transformers")
    with user_code(f"loading {folder}", folder):
        model = load_stranger_model(folder).eval()
    if has_weights(folder):
        return LoadedModel(model)
    return LoadedModel(model, (f"{folder} has no weights: they are random",))


def load_archive(path: Path) -> LoadedModel:
    """The program in a file of TorchScript or torch.export. Raises UserError for weights alone and for pickles."""
    names = _archive_names(path)
    if path.suffix == ".pt2" or any(name.endswith("archive_format") for name in names):
        return _load_exported(path, names)
    if any("/code/" in name for name in names):
        with user_code(f"loading {path.name}", path.parent):
            program = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
        return LoadedModel(program, ("TorchScript: the code in the file was run",))
    raise UserError(
        f"{path} holds weights or a pickled object, which is not loaded, because a pickle can run any code; name the "
        "class or a function that builds the model and loads them, as in model.py:load"
    )


def _archive_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []


def _load_exported(path: Path, names: list[str]) -> LoadedModel:
    if not names:
        raise UserError(f"{path} is damaged: an exported program is an archive")
    if any(Path(name).name.startswith("custom_obj") for name in names):
        raise UserError(f"{path} has objects of its own classes, which would be unpickled: export the model without")
    with user_code(f"loading {path.name}", path.parent), _weights_only():
        program = torch.export.load(path)
        return LoadedModel(program.module())


@contextmanager
def _weights_only() -> typing.Iterator[None]:
    """Let torch unpickle nothing but weights; its reader of exported programs would do so otherwise."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        del os.environ[names[0]]
        os.environ.update(before)
