"""The tensors of a foreign model: one safetensors file or several, read tensor by tensor."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, read_json
from manyformer.interop.foreign_config import CONFIG

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

REFUSED = {
    "pytorch_model.bin": "a pickle, which can run code when it is read",
    "pytorch_model.bin.index.json": "an index of pickles, which can run code when they are read",
    "tf_model.h5": "weights of TensorFlow",
    "flax_model.msgpack": "weights of Flax",
}
"""Files of weights that are not read, and what they are."""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of the model in a folder by name; each is read from its file when it is asked for.

    A file is closed after each tensor, so that memory holds no more of it than what is in use. Raises UserError for a
    folder without readable weights, and DamagedFile for a file that is missing or damaged, or has no tensor that the
    index says it has.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if (folder / WEIGHTS).exists():
            with self._opened(WEIGHTS) as file:
                self._files = dict.fromkeys(file.keys(), WEIGHTS)
        elif (folder / INDEX).exists():
            self._files = _read_index(folder / INDEX)
        else:
            raise _no_weights(folder)

    def __getitem__(self, name: str) -> Tensor:
        with self._opened(self._files[name], name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        # that of a mapping would read the tensor
        return name in self._files

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._folder / self._files[name]

    @contextmanager
    def _opened(self, name: str, tensor: str | None = None) -> Iterator[Any]:
        """A file, in which a tensor is to be read."""
        path = self._folder / name
        if not path.is_file():
            raise DamagedFile(f"{path} is missing, though {INDEX} lists its tensors")
        try:
            with safe_open(str(path), framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{path} is damaged: {f'{tensor}: ' if tensor else ''}{error}") from None


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters of peft, and no complete model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).exists()


def _read_index(file: Path) -> dict[str, str]:
    """The file of each tensor, all in the folder of the index."""
    content = read_json(file, "an index of weights")
    names = None
    if isinstance(content, dict):
        names = content.get("weight_map")
    if not isinstance(names, dict) or not all(type(name) is str for name in names.values()):
        raise DamagedFile(f"{file} is damaged: weight_map must give a file for each tensor")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DamagedFile(f"{file} is damaged: {name!r:.80} is not the name of a safetensors file in its folder")
    return names


def _no_weights(folder: Path) -> UserError:
    for name, kind in REFUSED.items():
        if (folder / name).exists():
            return UserError(
                f"{folder / name} holds {kind}, so it is not read; where it was made, "
                "model.save_pretrained(FOLDER, safe_serialization=True) writes the same as safetensors"
            )
    return UserError(f"{folder} has a config.json but no weights: {WEIGHTS} or {INDEX} is needed")
