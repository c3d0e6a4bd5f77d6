"""Low-rank adapters that `peft` wrote, added to the weights of the model that they were trained on."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.weight_files import WeightFiles

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"

MAX_ADAPTER_BYTES = 1 << 34
"""The largest file of adapters that is read: all of it is in memory."""

PLAIN_LORA: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""The settings of adapters that are sums of a matrix and a product of two, with the values that they must have."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters of peft, and no complete model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


class AdaptedWeights(Mapping[str, Tensor]):
    """The tensors of a model with the adapters of a folder merged: W + alpha / r B A (Hu et al. 2021, section 4.1).

    `alpha / sqrt(r)` with `use_rslora`, and transposed with `fan_in_fan_out`, as peft computes them. Other tensors in
    the file, such as trained biases or a head, take the place of those of the model. Raises UserError for adapters of
    another kind and for one whose matrix the model does not have, and DamagedFile for an unreadable file."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._weights, self._file = WeightFiles(base), folder / ADAPTER_WEIGHTS
        self._config = ForeignConfig.read_file(folder / ADAPTER_CONFIG)
        for name, expected in PLAIN_LORA.items():
            if (value := self._config.content.get(name)) != expected and value is not None:
                raise UserError(
                    f"{self._config.file}: {name} is {value!r:.60}, and only plain LoRA is merged; "
                    "merge_and_unload() of peft writes a complete model"
                )
        self._tensors = self._read()
        pairs = {name.removesuffix(LORA_A) for name in self._tensors if name.endswith(LORA_A)}
        self._adapted = {self._base_name(f"{name}.weight"): name for name in sorted(pairs)}
        lora_names = {name + end for name in pairs for end in (LORA_A, LORA_B)}
        if missing := sorted(lora_names - self._tensors.keys()):
            raise DamagedFile(f"{self._file} is damaged: {missing[0]} is missing")
        self._replaced = {self._base_name(name): name for name in self._tensors if name not in lora_names}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._replaced:
            return self._tensors[self._replaced[name]]
        tensor = self._weights[name]
        if name not in self._adapted:
            return tensor
        a, b = (self._tensors[self._adapted[name] + end].float() for end in (LORA_A, LORA_B))
        is_transposed = self._config.flag("fan_in_fan_out", default=False)
        outputs, inputs = reversed(tensor.shape) if is_transposed else tensor.shape
        rank, alpha = a.shape[0], self._config.number("lora_alpha", 8.0)
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
            raise UserError(
                f"{self._file}: the adapters of {name}, {shapes}, do not fit its shape {tuple(tensor.shape)}"
            )
        scale = alpha / (math.sqrt(rank) if self._config.flag("use_rslora", default=False) else rank)
        update = (b @ a).T if is_transposed else b @ a
        return tensor.float() + scale * update

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file if name in self._replaced else self._weights.file_of(name)

    def _read(self) -> dict[str, Tensor]:
        """The tensors of the adapters by the names of the model, without the prefix that peft adds."""
        if not self._file.is_file():
            pickled = (
                " (adapter_model.bin is a pickle, which can run code)"
                if self._file.with_name(ADAPTER_PICKLE).exists()
                else ""
            )
            raise UserError(f"{self._file} is missing{pickled}; save_pretrained of peft writes it")
        if self._file.stat().st_size > MAX_ADAPTER_BYTES:
            raise UserError(f"{self._file} is too large for adapters")
        try:
            with safe_open(str(self._file), framework="pt") as file:
                # with trained biases, peft also writes those that a trained head has replaced
                names = [name for name in file.keys() if ".original_module." not in name]  # noqa: SIM118
                return {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{self._file} is damaged: {error}") from None

    def _base_name(self, name: str) -> str:
        """The tensor of the model under this name, with or without the name of the model's trunk."""
        plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        for candidate in (plain, plain.partition(".")[2]):
            if candidate in self._weights:
                return candidate
        raise UserError(f"{self._file} has an adapter or a tensor for {name:.80}, which the model does not have")
