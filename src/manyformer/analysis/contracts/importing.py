"""Import a stranger's file as Python would, and say in one sentence what stands in the way.

The root of a file is the first folder above it without `__init__.py`; it comes before installed packages and after the
standard library, which a file named `types.py` must not hide. What the file's code raises names its own line.
"""

import ast
import importlib
import importlib.util
import linecache
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from manyformer.base.errors import UserError, list_names

IMPORT_SECONDS = 90
"""So long may a file be imported, or a model be built: one that trains takes longer."""

ANCESTORS = 6
"""So many folders above a file are searched for the modules that it imports."""

ALIAS = "checked_"
"""Begins the name of a module whose own name is taken by another one, as of a file `types.py`."""

PACKAGES_OF_MODULES = {
    "flash_attn": "flash-attn (needs CUDA to install)",
    "mamba_ssm": "mamba-ssm (needs CUDA to install)",
    "causal_conv1d": "causal-conv1d (needs CUDA to install)",
    "triton": "triton (Linux with a GPU)",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "hydra": "hydra-core",
    "fla": "flash-linear-attention",
    "rustbpe": "rustbpe (needs Rust)",
}
"""What installs a module that is called otherwise."""

MAIN_GUARD = "put what trains or reads the command line under `if __name__ == '__main__':`"


class TimeLimitReached(BaseException):
    """Raised in the user's code after `IMPORT_SECONDS`; not an Exception, which that code might catch."""


@dataclass(frozen=True)
class Place:
    """Where a file is in its package: the folder to import from, and the dotted name of the module."""

    root: Path
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Imported:
    """A module, and sentences about what was done to import it."""

    module: ModuleType
    notes: tuple[str, ...] = ()


def place_of(path: Path) -> Place:
    """The root of a file, never its own folder inside a package, and its name from there."""
    folder = path.parent
    parts = [] if path.stem == "__init__" else [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return Place(folder, tuple(parts))


def import_file(path: Path) -> Imported:
    """Import a file once in this process. Raises UserError, which names the line of the user's code."""
    path = path.resolve()
    _check_syntax(path)
    place = place_of(path)
    known = _already_imported(path)
    if known is not None:
        return Imported(known)
    _add_root(place.root)
    resolved: set[str] = set()
    while True:
        try:
            with user_code(f"importing {path.name}", place.root, path):
                return Imported(_import_once(path, place))
        except UserError as error:
            missing = _missing_name(error, path)
            if missing is None or missing in resolved:
                raise
            resolved.add(missing)
            # an import that the repository resolves from a higher folder, or from beside the file
            if not _resolve(missing, path, place):
                if len(place.parts) > 1 and not _reached(error, path):
                    return _import_without_parents(path, place, missing)
                raise


def import_module(name: str) -> Imported:
    """Import a module by its dotted name, from the current folder or an installed package. Raises UserError."""
    _add_root(Path.cwd())
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UserError(
            f"there is no module '{name}' in this folder or among the installed packages; a file is named with its "
            "ending, as in model.py:GPT"
        )
    origin = Path(spec.origin) if spec.origin not in (None, "built-in", "frozen", "namespace") else Path.cwd() / "x"
    with user_code(f"importing {name}", origin.parent):
        return Imported(importlib.import_module(name))


def _check_syntax(path: Path) -> None:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not source.strip():
        raise UserError(f"{path} is empty: there is no model in it")
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserError(_syntax_sentence(error, path)) from error
    except ValueError as error:
        raise UserError(f"{path} is no Python file: {error}") from error


def _syntax_sentence(error: SyntaxError, path: Path) -> str:
    file = error.filename or str(path)
    text = (error.text or "").strip()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    code = f" (`{text[:80]}`)" if text else ""
    return (
        f"{file}:{error.lineno or 1}: {error.msg}{code}; if this is newer syntax than that of Python {version}, "
        "check it with the Python that it is written for"
    )


def _already_imported(path: Path) -> ModuleType | None:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and module.__name__ != "__main__" and Path(file) == path:
            return module
    return None


def _add_root(root: Path) -> None:
    """Put a folder on the path: behind the standard library, before installed packages."""
    text = str(root)
    if text in sys.path:
        return
    installed = [
        index for index, entry in enumerate(sys.path) if Path(entry).name in ("site-packages", "dist-packages")
    ]
    sys.path.insert(min(installed, default=len(sys.path)), text)
    importlib.invalidate_caches()


def _import_once(path: Path, place: Place) -> ModuleType:
    top = place.parts[0]
    taken = top in sys.stdlib_module_names or _is_elsewhere(top, place.root)
    if len(place.parts) == 1 and path.stem != "__init__":
        return _execute(f"{ALIAS}{top}" if taken else top, path)
    if not taken:
        return importlib.import_module(place.name)
    # under another name, in which relative imports resolve as in its own
    alias = f"{ALIAS}{top}"
    folder = place.root / top
    if alias not in sys.modules:
        _execute(alias, folder / "__init__.py", package=folder)
    return importlib.import_module(".".join((alias, *place.parts[1:])))


def _is_elsewhere(top: str, root: Path) -> bool:
    """Whether a module of this name was imported from another place already."""
    module = sys.modules.get(top)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return file is None or not Path(file).resolve().is_relative_to(root.resolve())


def _execute(name: str, path: Path, package: Path | None = None) -> ModuleType:
    locations = None if package is None else [str(package)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickles look their module up by its name
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _missing_name(error: UserError, path: Path) -> str | None:
    """The module that was not found, as the line that imports it names it."""
    cause = error.__cause__
    if not isinstance(cause, ModuleNotFoundError) or not cause.name:
        return None
    frame = own_frame(cause, place_of(path).root)
    if frame is None:
        return cause.name
    for name, number in imported_names(Path(frame.filename)):
        if number == frame.lineno and f"{name}.".startswith(f"{cause.name}."):
            return name
    return cause.name


def _resolve(name: str, path: Path, place: Place) -> bool:
    """Make a module importable that is in a folder above, or that is beside the file."""
    for folder in list(place.root.parents)[:ANCESTORS]:
        if _holds(folder, name):
            _add_root(folder)
            return True
    beside = path.parent / f"{name}.py"
    if "." not in name and len(place.parts) > 1 and beside.is_file():
        # this module alone: its whole folder on the path would let a types.py there hide the standard library
        with user_code(f"importing {beside.name}", place.root, beside):
            _execute(name, beside)
        return True
    return False


def _holds(folder: Path, name: str) -> bool:
    """Whether a module is in a folder: as a file, as a package, or inside one that has no `__init__.py`."""
    path = folder.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return True
    return "." in name and path.is_dir()


def _reached(error: UserError, path: Path) -> bool:
    """Whether the error came from the file itself or what it imports, not from a package around it."""
    assert error.__cause__ is not None
    return any(Path(frame.filename) == path for frame in traceback.extract_tb(error.__cause__.__traceback__))


def _import_without_parents(path: Path, place: Place, missing: str) -> Imported:
    """Import a file of a package whose `__init__.py` needs what is missing, without running that."""
    folder = place.root
    for depth, part in enumerate(place.parts[:-1], start=1):
        folder = folder / part
        name = ".".join(place.parts[:depth])
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            package.__package__ = name
            sys.modules[name] = package
    with user_code(f"importing {path.name}", place.root, path):
        module = importlib.import_module(place.name)
    note = f"imported without the __init__.py of {place.parts[0]}, which needs '{missing}', which is not installed"
    return Imported(module, (note,))


@contextmanager
def user_code(doing: str, root: Path, path: Path | None = None) -> Iterator[None]:
    """Run code of the user: what it prints goes to stderr, it sees no arguments, and its errors become a UserError.

    `doing` says what for, and `root` is the folder in which a line counts as the user's own.
    """
    arguments = sys.argv
    sys.argv = [str(path or arguments[0])]
    try:
        with printing_to_stderr(), time_limit(IMPORT_SECONDS):
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(describe_error(error, doing, root)) from error
    finally:
        sys.argv = arguments


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Print to stderr what code of the user prints: stdout belongs to the report."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached after so many seconds, where the system has timers and this is the main thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: BaseException, doing: str, root: Path) -> str:
    """One sentence about what the user's code raised: the line, the error, and what to do where that is known."""
    frame = own_frame(error, root)
    where = "" if frame is None else f"{frame.filename}:{frame.lineno}: "
    code = ""
    if frame is not None and (line := linecache.getline(frame.filename, frame.lineno or 0).strip()):
        code = f" (`{line[:80]}`)"
    message = " ".join(str(error).split())[:300]
    if isinstance(error, TimeLimitReached):
        return f"{where}{doing} was stopped after {IMPORT_SECONDS} seconds{code}: does it train? {MAIN_GUARD}"
    if isinstance(error, SystemExit):
        return f"{where}the program ends itself while {doing}{code}; {MAIN_GUARD}"
    if isinstance(error, SyntaxError):
        return _syntax_sentence(error, root)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return where + _missing_sentence(error, frame, root)
    if _wants_cuda(error, message):
        return f"{where}{code[2:-1] or doing} needs CUDA, and this machine has none: choose the device by an argument"
    kind = type(error).__name__
    hint = f"; {MAIN_GUARD}" if "argv" in code else ""
    return f"{where}{doing} raised {kind}{': ' if message else ''}{message}{code}{hint}"


WANTS_CUDA = re.compile(r"CUDA|cuda|NVIDIA driver")
"""What errors say of code that asks for a GPU of this maker where there is none."""


def _wants_cuda(error: BaseException, message: str) -> bool:
    if torch.accelerator.is_available() or not isinstance(error, RuntimeError | AssertionError | ValueError):
        return False
    return WANTS_CUDA.search(message) is not None


def _missing_sentence(error: ModuleNotFoundError, frame: traceback.FrameSummary | None, root: Path) -> str:
    """All modules that a file imports and that are not installed, each with its line."""
    name = error.name or ""
    top = name.partition(".")[0]
    missing = {top: frame.lineno if frame is not None else None}
    if frame is not None:
        missing |= missing_imports(Path(frame.filename), root)
    if top != name and len(missing) == 1 and importlib.util.find_spec(top) is not None:
        return f"the module '{name}' does not exist, although '{top}' does: another version of it may be needed"
    texts = []
    for module, number in missing.items():
        line = "" if frame is None or number is None else linecache.getline(frame.filename, number).strip()
        texts.append(f"'{module}'" + (f" (line {number}: `{line[:60]}`)" if line else ""))
    packages = [PACKAGES_OF_MODULES.get(module, module) for module in missing]
    return f"{list_names(texts)} not installed; pip install {', '.join(packages)}, or import only where it is used"


def missing_imports(path: Path, root: Path) -> dict[str, int]:
    """The modules that a file imports at its top and that cannot be found, with the number of the line."""
    missing: dict[str, int] = {}
    for name, number in imported_names(path):
        top = name.partition(".")[0]
        if top not in missing and not _can_be_found(top) and not _holds(root, top):
            missing[top] = number
    return missing


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports at its top by absolute names, with the numbers of the lines."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    # what is in `try` or `if` has another way
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def _can_be_found(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def own_frame(error: BaseException, root: Path) -> traceback.FrameSummary | None:
    """The deepest line of a traceback that is in the user's code: under `root`, else in no installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    # a folder of the user may hold his environment
    plain = [frame for frame in inside if "site-packages" not in frame.filename[len(str(root)) :]]
    outside = [frame for frame in frames if Path(frame.filename).is_file() and not frame.filename.startswith(library)]
    for group in (plain, outside):
        if group:
            return group[-1]
    return None


def main_guarded_names(module: ModuleType) -> set[str]:
    """Names that a file assigns under `if __name__ == "__main__":` alone, which does not run when it is imported."""
    try:
        tree = ast.parse(Path(module.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id)
    return names


def run_user_code(function: Any, doing: str, root: Path) -> Any:
    """What a function of the user's code gives. Raises UserError, which names the line that raised."""
    with user_code(doing, root):
        return function()
