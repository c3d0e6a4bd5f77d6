"""The files of a folder that `transformers` or `peft` wrote: config.json, every field of it checked, and the tensors.

Tensors stand in one safetensors file or in several, and are read one by one. Low-rank adapters of `peft` are added to
those of the model that they were trained on."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile, read_json

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
        # null stands for a missing field in many configs
        value = default if value is None else value
        # not isinstance: true and false are numbers to Python
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
        # JSON has texts as keys
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
        # opened anew for each tensor, so that the file may be larger than the memory
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
        # an index from elsewhere must not name files outside of its folder
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


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
ADAPTER_PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"

MAX_ADAPTER_BYTES = 1 << 34
"""The largest file of adapters that is read: all of it is in memory."""

PLAIN_LORA: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": [],
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "use_qalora": False,
    "use_bdlora": None,
    "kasa_config": None,
    "monteclora_config": None,
}
"""The settings of adapters that are sums of a matrix and a product of two, with the values, other than null, that they
must have."""

ADDITIVE_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""The values of `init_lora_weights` with which training began from the model's own weights. The others (pissa, olora,
corda, loftq) change these first: peft repeats it when it reads the adapters, and it adds them to what is left."""

_PLAIN_NAME = re.compile(r"\^?[\w.]+")


class AdaptedWeights(WeightFiles):
    """The tensors of a model with the adapters of a folder merged: W + alpha / r B A (Hu et al. 2021, section 4.1).

    `alpha / sqrt(r)` with `use_rslora`, and transposed with `fan_in_fan_out`, as peft computes them. Other tensors in
    the file, such as trained biases or a head, take the place of those of the model. Raises UserError for adapters of
    another kind, for one whose matrix the model does not have, and where the file does not have what the settings say,
    and DamagedFile for an unreadable file."""

    def __init__(self, base: Path, folder: Path) -> None:
        super().__init__(base)
        self._file = folder / ADAPTER_WEIGHTS
        self._config = HFConfig.read_file(folder / ADAPTER_CONFIG)
        # judged by the settings before any tensor is read
        self._check_kind()
        self._tensors = self._read()
        pairs = {name.removesuffix(LORA_A) for name in self._tensors if name.endswith(LORA_A)}
        self._adapted = {self._base_name(f"{name}.weight"): name for name in sorted(pairs)}
        lora_names = {name + end for name in pairs for end in (LORA_A, LORA_B)}
        if missing := sorted(lora_names - self._tensors.keys()):
            raise DamagedFile(f"{self._file} is damaged: {missing[0]} is missing")
        for name in sorted(pairs):
            self._check_rank(name)
        self._replaced = {self._base_name(name): name for name in self._tensors if name not in lora_names}
        self._check_saved_modules()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._replaced:
            return self._tensors[self._replaced[name]]
        tensor = super().__getitem__(name)
        if name not in self._adapted:
            return tensor
        a, b = (self._tensors[self._adapted[name] + end].float() for end in (LORA_A, LORA_B))
        is_transposed = self._config.flag("fan_in_fan_out", default=False)
        # GPT-2's matrices are stored as (inputs, outputs), those of adapters never
        outputs, inputs = reversed(tensor.shape) if is_transposed else tensor.shape
        rank = self._rank(self._adapted[name])
        alpha = self._config.number("lora_alpha", 8.0)
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
            raise UserError(
                f"{self._file}: the adapters of {name}, {shapes}, do not fit its shape {tuple(tensor.shape)}"
            )
        scale = alpha / rank
        if self._config.flag("use_rslora", default=False):
            scale = alpha / math.sqrt(rank)
        update = (b @ a).T if is_transposed else b @ a
        # in float32, as peft merges: half precision would round the small update away
        return tensor.float() + scale * update

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        if name in self._replaced:
            return self._file
        return super().file_of(name)

    def _check_kind(self) -> None:
        """Raise UserError for adapters that are not added to the weights of the model as they are."""
        content = self._config.content
        differing = {
            name: content[name] for name, expected in PLAIN_LORA.items() if content.get(name) not in (None, expected)
        }
        start = content.get("init_lora_weights")
        if start not in ADDITIVE_STARTS:
            differing["init_lora_weights"] = start
        if differing:
            name, value = next(iter(differing.items()))
            raise UserError(
                f"{self._config.file}: {name} is {value!r:.60}, and only plain LoRA is merged; "
                "merge_and_unload() of peft writes a complete model"
            )

    def _rank(self, name: str) -> int:
        shape = self._tensors[name + LORA_A].shape
        if shape:
            return shape[0]
        return 0

    def _check_rank(self, name: str) -> None:
        """Raise UserError for an adapter of another rank than the settings give it, which peft does not read."""
        rank = self._rank(name)
        patterns = self._config.part("rank_pattern")
        ranks = {self._config.size("r", 8)}
        by_name = {key: patterns.size(key) for key in patterns.content}
        matching = [key for key in by_name if name == key.removeprefix("^") or name.endswith(f".{key}")]
        if not all(map(_PLAIN_NAME.fullmatch, by_name)):
            # regular expressions of a stranger, which may take for ever, are not carried out
            ranks |= set(by_name.values())
        elif matching:
            ranks = {by_name[matching[0]]}
        if rank not in ranks:
            raise UserError(
                f"{self._file}: the adapter of {name:.80} has rank {rank}, and r and rank_pattern in "
                f"{self._config.file.name} say {' or '.join(map(str, sorted(ranks)))}"
            )

    def _check_saved_modules(self) -> None:
        """Raise UserError if the settings name a part of the model as trained, and the file does not have it."""
        for module in self._config.entries("modules_to_save", str) or ():
            for name in self:
                if f".{module}." in f".{name}" and name not in self._replaced:
                    raise UserError(
                        f"{self._config.file}: modules_to_save names {module:.80}, and {self._file.name} does not have "
                        f"{name}; save_pretrained of peft writes it"
                    )

    def _read(self) -> dict[str, Tensor]:
        """The tensors of the adapters by the names of the model, without the prefix that peft adds."""
        if not self._file.is_file():
            pickled = ""
            if self._file.with_name(ADAPTER_PICKLE).exists():
                pickled = " (adapter_model.bin is a pickle, which can run code)"
            raise UserError(f"{self._file} is missing{pickled}; save_pretrained of peft writes it")
        if self._file.stat().st_size > MAX_ADAPTER_BYTES:
            raise UserError(f"{self._file} is too large for adapters")
        try:
            with safe_open(str(self._file), framework="pt") as file:
                # with trained biases, peft also writes those that a trained head has replaced
                names = [name for name in file.keys() if ".original_module." not in name]  # noqa: SIM118
                return {name.removeprefix(ADAPTER_PREFIX): file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{self._file} is damaged: {error}") from None

    def _base_name(self, name: str) -> str:
        """The tensor of the model under this name, with or without the name of the model's trunk."""
        plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        # adapters of a whole model name its trunk first, and the file of a bare trunk does not
        for candidate in (plain, plain.partition(".")[2]):
            if candidate in self:
                return candidate
        raise UserError(f"{self._file} has an adapter or a tensor for {name:.80}, which the model does not have")
