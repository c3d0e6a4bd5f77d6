"""Saved models: a folder with config.json (the spec), model.safetensors (the weights) and a manifest; no pickle.

A model from another library may also have a generation.json.
"""

import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import StringConstraints
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from manyformer.base.errors import NonFiniteWeights, UserError
from manyformer.base.files import TOKENIZER_FILES
from manyformer.base.files.atomic_files import (
    atomic_copy,
    atomic_path,
    draft_path,
    make_folder,
    remove_draft,
    report_disk_full,
    report_not_written,
    sync_folder,
)
from manyformer.base.files.json_records import Count, DamagedFile, FileRecord, read_json
from manyformer.base.files.text_tables import printable_line
from manyformer.base.files.verified_folder import MARK, VerifiedFolder, write_manifest
from manyformer.base.keyword_checks import as_json
from manyformer.nn.runtime.torch_internals import PLAIN_TENSORS, tensor_norms
from manyformer.nn.runtime.training_hooks import AddsToModule

GENERATION_FILE = "generation.json"


class GenerationSettings(FileRecord):
    """With which token targets begin, which end them, and which are never generated or always stand first or last.

    Models of this library have none of it: their tokenizer names the start and the end. `forced_first` is the token
    after `start` (the language of an mBART), and `forced_last` ends a text that reaches its longest length.
    """

    title: ClassVar[str] = "the settings of generation"
    start: Count
    pad: Count
    stop_ids: tuple[Count, ...]
    banned_ids: tuple[Count, ...] = ()
    forced_first: Count | None = None
    forced_last: Count | None = None


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the shard of it in this process."""
    if hasattr(tensor, "to_local"):
        local: Tensor = tensor.to_local()
    else:
        local = tensor
    return local


def find_non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those tensors, or of their local shards, that hold a number that is not finite.

    The numbers are read from the device together."""
    return [name for name, magnitude in _magnitudes(tensors).items() if not math.isfinite(magnitude)]


def _magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest magnitude in each tensor of floating point numbers; NaN if one of them is NaN."""
    local = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in local.items():
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    magnitudes: dict[str, float] = {}
    for on_device in by_device.values():
        # needs no tensor of booleans as large as the weight
        norms = tensor_norms(list(on_device.values()), math.inf)
        magnitudes.update(zip(on_device, torch.stack([norm.float() for norm in norms]).tolist(), strict=True))
    return {name: magnitudes[name] for name in local if name in magnitudes}


def warn_non_finite(model: nn.Module, source: object) -> None:
    """Warn if weights of `model`, which were read from `source`, are not finite.

    A buffer may be infinite by design, as a mask of scores is, but not NaN."""
    parameters = dict(model.named_parameters())
    bad_names = find_non_finite(parameters)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in parameters}
    bad_names += [name for name, magnitude in _magnitudes(buffers).items() if math.isnan(magnitude)]
    if bad_names:
        _warn(bad_names, len(parameters) + len(buffers), source)


def warn_non_finite_tensors(tensors: Mapping[str, Tensor], source: object) -> None:
    """The same for tensors that are read for a model of another library."""
    if bad_names := [name for name, magnitude in _magnitudes(tensors).items() if math.isnan(magnitude)]:
        _warn(bad_names, len(tensors), source)


def _warn(bad_names: list[str], total: int, source: object) -> None:
    if len(bad_names) == 1:
        subject = f"a tensor of the weights is not finite ({bad_names[0]})"
    else:
        subject = f"{len(bad_names):,} of {total:,} tensors of the weights are not finite (the first is {bad_names[0]})"
    sentence = f"{source}: {subject}; what the model computes is no number"
    warnings.warn(sentence, NonFiniteWeights, stacklevel=4)


CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class ModelSpec(NamedTuple):
    """The specification from which a model can be rebuilt: the recipe, all of its keywords, and the recipe's module."""

    recipe: str
    keywords: dict[str, Any]
    module: str = ""

    def settings_list(self) -> str:
        """The keywords as a list in Markdown, with the lists that a run file has in place of tuples."""
        return "\n".join(printable_line(f"- {name}: {as_json(value)}") for name, value in self.keywords.items())


class ModelRecord(FileRecord):
    """The content of config.json: a model's spec."""

    title = "the description of a model"
    format_number = 2
    recipe: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    recipe_module: Annotated[str, StringConstraints(max_length=200)]
    keywords: dict[str, Any]


def refuse_changed_modules(model: nn.Module, action: str) -> None:
    """Raise UserError if a tool has changed a module so that no recipe builds it: it says what to undo first, and how.

    `action` is what cannot be done with such a model, such as "saved"."""
    for name, module in model.named_modules():
        if change := _change_of(module):
            what, remedy = change
            raise UserError(f"{name or 'the model'} {what}, so the model cannot be {action} as it is: {remedy}")


def _change_of(module: nn.Module) -> tuple[str, str] | None:
    """What a tool has made of the module, and how that is undone; None for a module as its class makes it."""
    library = type(module).__module__
    if isinstance(module, AddsToModule):
        return "has an adapter", module.how_to_merge
    if library.startswith("peft."):
        return (
            "has an adapter of peft",
            "merge it first (`model = peft_model.merge_and_unload()`), or save it alone (`peft_model.save_pretrained`)",
        )
    if is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return (
            f"has a parametrization ({names})",
            'remove it first, which keeps its values (`torch.nn.utils.parametrize.remove_parametrizations(module, "'
            f'{names.partition(",")[0]}")`)',
        )
    for hook in module._forward_pre_hooks.values():
        if hasattr(hook, "compute_mask"):
            masked = getattr(hook, "_tensor_name", "weight")
            return (
                f"has a pruning mask ({masked})",
                f'make it permanent first (`torch.nn.utils.prune.remove(module, "{masked}")`)',
            )
        if type(hook).__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"):
            kind = type(hook).__module__.rpartition(".")[2]
            return f"has a {kind}", f"remove it first (`torch.nn.utils.remove_{kind}(module)`)"
    # those that are distributed have a shard here
    packed = [weight for weight in module._parameters.values() if weight is not None and _is_packed(weight)]
    if library.startswith("torch.ao.") or packed:
        return "has quantized weights", "save it before it is quantized, and quantize what `load` returns"
    return None


def _is_packed(weight: Tensor) -> bool:
    """Whether the numbers of a weight are packed in a type of its own, and not a shard of a distributed one."""
    return type(weight) not in PLAIN_TENSORS and not hasattr(weight, "to_local")


def write_parts(model: nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Write the spec and the weights of a model into an existing folder."""
    record = ModelRecord(recipe=spec.recipe, recipe_module=spec.module, keywords=spec.keywords)
    record.write(folder / CONFIG_FILE)
    with atomic_path(folder / WEIGHTS_FILE) as file:
        save_model(model, str(file))


def copy_tokenizers(source: Path, target: Path) -> None:
    """Copy the tokenizers and labels of the saved model in `source` into the folder `target`."""
    files = VerifiedFolder.open(source)
    for name in TOKENIZER_FILES:
        if name in files:
            atomic_copy(files.file(name), target / name)


@contextmanager
def replacement_folder(path: Path) -> Iterator[Path]:
    """A new folder that atomically replaces the folder `path` when the block succeeds and is removed when it fails.

    It gets a manifest of its files; README.md is not in it, because it is for people, who may edit it.
    """
    make_folder(path.parent)
    with report_disk_full(path):
        with report_not_written(path):
            draft = draft_path(path)
            # beside the folder that it replaces, on the same disk, where renaming is atomic
            draft.mkdir()
            if (path / MARK).is_file():
                # its work may consist of more than this folder
                atomic_copy(path / MARK, draft / MARK)
        try:
            yield draft
            with report_not_written(path):
                write_manifest(draft, without=("README.md",))
                if path.exists():
                    # a folder cannot be renamed over another: for a moment there is none of this name
                    old = draft_path(path.with_name(f"{path.name}-old"))
                    os.rename(path, old)
                    os.rename(draft, path)
                    remove_draft(old)
                else:
                    os.rename(draft, path)
                # a rename is on the disk only when the folder that holds the names is
                sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def read_spec(path: Path) -> ModelSpec:
    """The spec of the model in the folder `path`; nothing is imported.

    Raises UserError where the folder holds no model, and DamagedFile where a file is not as it was written.
    """
    return open_saved_model(path)[0]


def open_saved_model(path: Path) -> tuple[ModelSpec, VerifiedFolder]:
    """`read_spec`, with the folder's files and their sums."""
    file = path / CONFIG_FILE
    if not file.exists():
        raise UserError(f"{path} holds no model: {CONFIG_FILE} is missing")
    if is_hugging_face(path):
        raise UserError(f"{path} holds a model of Hugging Face's transformers: `manyformer import {path} --out FOLDER`")
    # the format is compared first: a folder of another format may have no manifest
    record = ModelRecord.read(file)
    files = VerifiedFolder.open(path)
    files.file(CONFIG_FILE)
    return ModelSpec(record.recipe, record.keywords, record.recipe_module), files


def is_hugging_face(path: Path) -> bool:
    """Whether the folder holds a model that Hugging Face's `transformers` wrote."""
    file = path / CONFIG_FILE
    content = None
    if file.exists():
        content = read_json(file, "the description of a model")
    return (
        isinstance(content, dict)
        and "recipe" not in content
        and bool({"model_type", "architectures", "transformers_version"} & content.keys())
    )


def read_weights(model: nn.Module, folder: Path | VerifiedFolder) -> None:
    """Fill `model` from a folder. Raises UserError where the file is damaged or does not fit."""
    file = (folder if isinstance(folder, Path) else folder.folder) / WEIGHTS_FILE
    fill_weights(model, read_tensors(folder), f"{file} does not fit its config.json", file)


def read_tensors(folder: Path | VerifiedFolder, name: str = WEIGHTS_FILE) -> dict[str, Tensor]:
    """The tensors in a file of a folder, by default its weights. Raises DamagedFile."""
    if isinstance(folder, Path):
        path = folder
    else:
        path = folder.folder
    if not (path / name).exists():
        raise DamagedFile(f"{path} holds no weights: {name} is missing")
    file = VerifiedFolder.of(folder).file(name)
    try:
        return load_file(str(file))
    except SafetensorError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from error


def fill_weights(model: nn.Module, tensors: dict[str, Tensor], error_prefix: str, source: object) -> None:
    """Copy `tensors` into the weights of `model`. Raises UserError, beginning with `error_prefix`, on a mismatch.

    Warns if weights that were read from `source` are not finite (`NonFiniteWeights`)."""
    # the parameters themselves, not copies of them: tied ones are one object under several names
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if unknown := sorted(set(tensors) - set(expected)):
        raise UserError(f"{error_prefix}: it holds {unknown[0]}, which the model does not have")
    for name, value in tensors.items():
        if expected[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, the model {tuple(expected[name].shape)}"
            raise UserError(f"{error_prefix}: {name} has the shape {shapes}")
        if expected[name].is_floating_point() != value.is_floating_point():
            raise UserError(f"{error_prefix}: {name} holds {value.dtype}, the model {expected[name].dtype}")
    # a tied weight is stored once, under one of its names
    filled_ids = {id(expected[name]) for name in tensors}
    if missing := [name for name, tensor in expected.items() if id(tensor) not in filled_ids]:
        raise UserError(f"{error_prefix}: {missing[0]} is missing")
    with torch.no_grad():
        for name, value in tensors.items():
            expected[name].copy_(value)
    warn_non_finite(model, source)
