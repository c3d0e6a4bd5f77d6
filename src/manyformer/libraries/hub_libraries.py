"""What is asked of `transformers`, `datasets` and `huggingface_hub`; each is imported by the first call."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyformer.libraries.library_calls import RefusedByLibrary, library_call


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
