"""Low-rank adapters that `peft` wrote, added to the weights of the model that they were trained on."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile
from manyformer.interop.hf_folder import ADAPTER_CONFIG, HFConfig, WeightFiles

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
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
        outputs, inputs = reversed(tensor.shape) if is_transposed else tensor.shape
        rank = self._rank(self._adapted[name])
        alpha = self._config.number("lora_alpha", 8.0)
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
            raise UserError(
                f"{self._file}: the adapters of {name}, {shapes}, do not fit its shape {tuple(tensor.shape)}"
            )
        scale = alpha / (math.sqrt(rank) if self._config.flag("use_rslora", default=False) else rank)
        update = (b @ a).T if is_transposed else b @ a
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
                return {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{self._file} is damaged: {error}") from None

    def _base_name(self, name: str) -> str:
        """The tensor of the model under this name, with or without the name of the model's trunk."""
        plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        for candidate in (plain, plain.partition(".")[2]):
            if candidate in self:
                return candidate
        raise UserError(f"{self._file} has an adapter or a tensor for {name:.80}, which the model does not have")
