"""The files of a folder that `transformers` wrote: config.json, every field of it checked, and the tensors.

Tensors stand in one safetensors file or in several, and are read one by one."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, read_json

CONFIG = "config.json"
GENERATION = "generation_config.json"

MODEL_TYPE = "manyformer"
"""The `model_type` of exported models that no class of `transformers` equals."""

SPEC_FIELD = "manyformer"
"""The field of a config with the recipe and the keywords of an exported model; `transformers` keeps it."""

ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""The names that the dropout of attention weights has."""

MAX_SIZE = 1 << 24
"""The largest whole number that a config may hold."""

_ENTRY_NAMES: dict[type, str] = {str: "texts", int: "whole numbers"}

Entry = TypeVar("Entry", str, int)


class HFConfig(NamedTuple):
    """The settings in a file, and what is read of it; every method raises UserError that names the file and field.

    `tensors` are the names of the tensors that the model has, which decide where settings leave something open."""

    file: Path
    content: dict[str, Any]
    tensors: Collection[str] = ()

    @classmethod
    def read(cls, folder: Path) -> "HFConfig":
        """The settings of the model in a folder."""
        return cls.read_file(folder / CONFIG)

    @classmethod
    def read_file(cls, file: Path) -> "HFConfig":
        """The settings in a file."""
        content = read_json(file, "the description of a model")
        if not isinstance(content, dict):
            raise DamagedFile(f"{file} is damaged: it is not the description of a model")
        return cls(file, content)

    @property
    def architecture(self) -> str:
        """The name of the model's class, "none" where the config names none."""
        names = self.content.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
        return "none"

    @property
    def is_bare(self) -> bool:
        """Whether the model is an encoder without a head, such as a `BertModel`."""
        return self.architecture.endswith("Model") and "LMHead" not in self.architecture

    def part(self, name: str) -> "HFConfig":
        """The settings in a field, none if it is missing or null."""
        value = self.content.get(name)
        if value is None:
            return HFConfig(self.file, {})
        if not isinstance(value, dict):
            raise self._error(name, value, "an object")
        return HFConfig(self.file, value)

    def entries(self, name: str, kind: type[Entry]) -> list[Entry] | None:
        """A list of values of one type, or None for a missing field and for null."""
        value = self.content.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            raise self._error(name, value, f"a list of {_ENTRY_NAMES[kind]}")
        return value

    @property
    def model_type(self) -> str:
        """What the model is."""
        return str(self.content["model_type"])

    def size(self, name: str, default: int | str | None = None) -> int:
        """A whole number of 1 or more; `default` stands for a missing field and for null, as a number or a field."""
        value = self.content.get(name)
        if value is None and isinstance(default, str):
            return self.size(default)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise self._error(name, value, f"a whole number from 1 to {MAX_SIZE:,}")
        return value

    def optional_size(self, name: str) -> int | None:
        """A whole number of 1 or more, or None for a missing field and for null."""
        if self.content.get(name) is None:
            return None
        return self.size(name)

    def number(self, name: str, default: float) -> float:
        """A number of 0 or more."""
        value = self.content.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            raise self._error(name, value, "a number of 0 or more")
        return float(value)

    def positive_number(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if value == 0:
            raise self._error(name, value, "a number above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        """A number of 0 or more, or None for a missing field and for null."""
        if self.content.get(name) is None:
            return None
        return self.number(name, 0.0)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.content.get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def choice(self, name: str, default: str, choices: Collection[str]) -> str:
        """One of some names."""
        value = self.content.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self._error(name, value, f"one of {', '.join(sorted(choices))}")
        return value

    def whole_number(self, name: str, default: int) -> int:
        """A whole number of 0 or more; `default` stands for a missing field and for null."""
        value = self.content.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self._error(name, value, f"a whole number from 0 to {MAX_SIZE:,}")
        return value

    def labels(self) -> tuple[str, ...]:
        """The names of the classes by their numbers, two without names where the config lists none."""
        names = self.part("id2label").content or {"0": "LABEL_0", "1": "LABEL_1"}
        labels = tuple(names.get(str(number)) for number in range(len(names)))
        if not all(isinstance(label, str) for label in labels):
            raise self._error("id2label", names, "a name for each number from 0 on")
        return tuple(map(str, labels))

    def attention_dropout(self) -> dict[str, str]:
        """The dropout of attention weights, which is not taken over, with the keyword that gives it."""
        return {
            f"{CONFIG}: {name} {value}": f"for training alone: set attention_dropout={value} there"
            for name in ATTENTION_DROPOUT
            if (value := self.content.get(name)) and isinstance(value, float)
        }

    def require(self, name: str, *, expected: Any, default: Any) -> None:
        """Raise UserError unless a field has the only value that our models can have."""
        value = self.content.get(name, default)
        if value != expected:
            raise UserError(f"{self.file}: {name} is {value!r:.60}, and no recipe has that (only {expected!r})")

    def _error(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.file}: {name} ({value!r:.60}) must be {expected}")


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
