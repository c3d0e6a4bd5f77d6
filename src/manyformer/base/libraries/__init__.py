"""Calls of the libraries of Hugging Face, which can neither ask the user nor, unless told to, reach the network.

`transformers`, `datasets` and `huggingface_hub` are imported by the first call that needs them."""

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

OFFLINE_SWITCHES = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""The modules and variables by which the libraries decide, at each request, whether there is a network."""

_STDIN = 0


class RefusedByLibrary(ValueError):
    """What a library raised, in one line."""

    @classmethod
    def of(cls, error: BaseException) -> "RefusedByLibrary":
        """The sentence of another error, cut where it becomes long."""
        return cls(" ".join(str(error).split())[:300])


class _Shared:
    """How many calls in progress are without a network or an input, and what they put back at the end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.offline_calls = self.silent_calls = 0
        self.switches: list[tuple[Any, str, bool]] = []
        self.stdin: Any = None


_shared = _Shared()


@contextmanager
def library_call(*, online: bool = False) -> Iterator[None]:
    """A block in which a library works: it finds standard input at its end, and a network only if `online`.

    Import the library before: its switches are those of imported modules. Nothing of the environment is changed, and
    all is put back at the end of the block."""
    with ExitStack() as stack:
        stack.enter_context(without_panics())
        stack.enter_context(_without_input())
        if not online:
            stack.enter_context(_without_network())
        yield


@contextmanager
def without_panics() -> Iterator[None]:
    """A block in which panics of libraries in Rust, which no `except Exception` catches, become `RefusedByLibrary`."""
    try:
        yield
    except BaseException as error:
        # the class is in no module from which it could be imported
        if type(error).__name__ != "PanicException":
            raise
        raise RefusedByLibrary.of(error) from None


@contextmanager
def _without_network() -> Iterator[None]:
    with _shared.lock:
        _shared.offline_calls += 1
        done = {module.__name__ for module, _, _ in _shared.switches}
        for name, switch in OFFLINE_SWITCHES:
            module = sys.modules.get(name)
            # a library that an earlier call in progress has switched keeps what that call puts back
            if module is not None and name not in done:
                _shared.switches.append((module, switch, getattr(module, switch, False)))
                setattr(module, switch, True)
    try:
        yield
    finally:
        with _shared.lock:
            _shared.offline_calls -= 1
            if not _shared.offline_calls:
                for module, switch, value in _shared.switches:
                    setattr(module, switch, value)
                _shared.switches.clear()


@contextmanager
def _without_input() -> Iterator[None]:
    """Python's standard input is empty and, for the main thread, that of the process and its children, too.

    In other threads the process keeps its own: the main thread may be reading it."""
    with _shared.lock:
        if not _shared.silent_calls:
            _shared.stdin = sys.stdin
            # a question to the user finds the end of the input and fails
            sys.stdin = io.TextIOWrapper(io.BytesIO())
        _shared.silent_calls += 1
    saved = None
    if threading.current_thread() is threading.main_thread():
        saved = _replace_descriptor()
    try:
        yield
    finally:
        if saved is not None:
            os.dup2(saved, _STDIN)
            os.close(saved)
        with _shared.lock:
            _shared.silent_calls -= 1
            if not _shared.silent_calls:
                sys.stdin = _shared.stdin
                _shared.stdin = None


def _replace_descriptor() -> int | None:
    """Put the null device in the place of standard input; returns a copy of this, None if it is closed."""
    try:
        saved = os.dup(_STDIN)
    except OSError:
        return None
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, _STDIN)
    os.close(empty)
    return saved


def load_auto_tokenizer(folder: Path) -> Any:
    """The tokenizer of `transformers` in a folder, without any code or file from elsewhere.

    Raises ImportError without the packages that read it, and RefusedByLibrary for one that they do not read."""
    import transformers

    with library_call(), _without_warnings("transformers"):
        try:
            return transformers.AutoTokenizer.from_pretrained(
                folder.resolve(), local_files_only=True, trust_remote_code=False
            )
        except ImportError:
            raise
        # the classes raise whatever their parsers do
        except Exception as error:
            raise RefusedByLibrary.of(error) from None


def reload_model(model_class: Any, folder: str) -> Any:
    """The model that a class has just saved in a folder of ours."""
    with library_call():
        return model_class.from_pretrained(folder)


def load_stranger_model(folder: Path) -> Any:
    """The model of `transformers` in a folder, of the class that its configuration names; without weights, random ones.

    Raises ImportError without the package, and whatever this raises."""
    import transformers

    with library_call(), silence_transformers():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        model_class: Any = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        if has_weights(folder):
            # a pickle of weights is read as weights alone
            return model_class.from_pretrained(folder, local_files_only=True, weights_only=True)
        from_config = getattr(model_class, "from_config", model_class)
        return from_config(config)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a file of weights beside its configuration."""
    return any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir())


def load_saved_dataset(folder: str) -> Any:
    """What `save_to_disk` of `datasets` wrote into a folder. Raises ImportError without the package."""
    import datasets

    with library_call():
        return datasets.load_from_disk(folder)


def load_dataset_split(name: str, config: str | None, split: str) -> Any:
    """A split of a data set on the hub, or of the files in a folder, which never need the network.

    Raises ImportError without the package, and whatever this raises."""
    import datasets

    with library_call(online=_is_hub_name(name)):
        return datasets.load_dataset(name, config, split=split, trust_remote_code=False)


def without_decoding(records: Any) -> Any:
    """The same records with pictures and sounds as they are stored: decoding them opens the addresses they name."""
    for name, feature in records.features.items():
        if getattr(feature, "decode", False):
            # the feature stays, its decoder does not
            records = records.cast_column(name, type(feature)(decode=False))
    return records


def upload_folder(folder: Path, name: str, message: str, *, leave_out: Sequence[str] = ()) -> str:
    """Upload a folder to the hub as the model `name`, private if it is new; returns the address.

    Files with the names of `leave_out` stay here.
    Raises ImportError without the package, and RefusedByLibrary where the hub does not take it."""
    import huggingface_hub

    with library_call(online=True):
        api = huggingface_hub.HfApi()
        try:
            address = api.create_repo(repo_id=name, private=True, exist_ok=True)
            api.upload_folder(
                repo_id=name, folder_path=str(folder), commit_message=message, ignore_patterns=list(leave_out)
            )
        # the package raises whatever its transport does
        except Exception as error:
            raise RefusedByLibrary.of(error) from None
    return str(address)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """A context without warnings and progress bars of transformers, if it is imported."""
    library: Any = sys.modules.get("transformers")
    if library is None:
        yield
        return
    reports = library.utils.logging
    # whatever the user has set comes back
    level = reports.get_verbosity()
    had_progress_bars = reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if had_progress_bars:
            reports.enable_progress_bar()


@contextmanager
def _without_warnings(library: str) -> Iterator[None]:
    """Without a library's warnings about files that a folder may lack."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_hub_name(name: str) -> bool:
    """Whether a name can only be one of the hub, `NAME` or `OWNER/NAME`, and no path on this machine."""
    return not Path(name).exists() and not name.startswith(("/", ".", "~")) and name.count("/") < 2
