"""Initialize a model with the weights of an earlier run, e.g. for the next stage of training with longer windows."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from manyformer.api import load
from manyformer.data.opened import OpenedData
from manyformer.errors import UserError, suggest_names
from manyformer.head_pruning import parse_heads, remove_heads, subtract_heads
from manyformer.models import Model
from manyformer.models.model_files import fill_weights, read_tensors
from manyformer.position import LearnedPosition
from manyformer.recipes.keywords import REMOVED_HEADS
from manyformer.temporary_folders import temporary_folder
from manyformer.training_hooks import OptionalOnLoad, RequiresPretrained, WrapsLoadedModule


def load_initial_weights(model: Model, path: str, data: OpenedData) -> None:
    """Load the weights of a saved model, or of the final model of a run, with the same tokenizer into `model`.

    Settings that decide no weights may differ: windows, dropout, the data, and added modules. A position table may have
    more rows; the loaded rows are then repeated until it is filled (Beltagy et al. 2020, section 5). Raises UserError
    for weights that do not fit.
    """
    folder = Path(path)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    _check_tokenizers(folder, data)
    tensors = _read_without_heads(folder, model)
    for name, part in model.named_modules():
        table = f"{name}.weight"
        if isinstance(part, LearnedPosition) and table in tensors:
            tensors[table] = _repeat_rows(tensors[table], part.weight.shape[0])
    fill_weights(model, _match_weights(model, tensors), f"init_from: {folder}")


def _read_without_heads(folder: Path, model: Model) -> dict[str, Tensor]:
    """The weights in a folder, without those of the heads that `model` was built without but the saved model has."""
    removed = parse_heads(model.spec.keywords.get(REMOVED_HEADS) or "")
    if not removed:
        return read_tensors(folder)
    saved_model = load(folder)
    remove_heads(saved_model, subtract_heads(removed, parse_heads(saved_model.spec.keywords.get(REMOVED_HEADS) or "")))
    return saved_model.state_dict()


def freeze_parts(model: Model, parts: Sequence[str]) -> None:
    """Exclude the weights of the modules with these names from training. Raises UserError for unknown names."""
    modules = dict(model.named_modules())
    for part in parts:
        if part not in modules:
            raise UserError(f"frozen: the model has no part '{part}'; {suggest_names(part, filter(None, modules))}")
        modules[part].requires_grad_(requires_grad=False)


def check_random_init(model: Model) -> None:
    """Check that `model` can be trained from random weights. Raises UserError if a module needs trained weights."""
    for part in model.modules():
        if isinstance(part, RequiresPretrained):
            raise UserError(
                f"{part.requirement}, and there is none: give the folder of a run of that model as init_from"
            )


def _match_weights(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename loaded tensors to their names in `model`, add initial tensors of modules the earlier run lacks."""
    model_tensors, matched = model.state_dict(), dict(tensors)
    for name, part in model.named_modules():
        if isinstance(part, WrapsLoadedModule):
            prefix, wrapped_prefix = f"{name}.", f"{name}.{part.wrapped_name}."
            for key in [key for key in matched if key.startswith(prefix) and key not in model_tensors]:
                if (wrapped_key := wrapped_prefix + key.removeprefix(prefix)) in model_tensors:
                    matched[wrapped_key] = matched.pop(key)
        if isinstance(part, OptionalOnLoad):
            # an earlier run may have tensors of another rule or of another number of layers under the same names
            initial = {key: value for key, value in model_tensors.items() if key.startswith(f"{name}.")}
            loaded = {key: matched.pop(key) for key in list(matched) if key.startswith(f"{name}.")}
            fits = initial.keys() == loaded.keys() and all(initial[key].shape == loaded[key].shape for key in initial)
            matched.update(loaded if fits else initial)
    return matched


def _repeat_rows(table: Tensor, rows: int) -> Tensor:
    if rows <= table.shape[0]:
        return table
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _check_tokenizers(folder: Path, data: OpenedData) -> None:
    with temporary_folder() as data_folder:
        data.save(data_folder)
        for data_file in sorted(data_folder.glob("tokenizer*.json")):
            model_file = folder / data_file.name
            if not model_file.is_file() or model_file.read_bytes() != data_file.read_bytes():
                problem = f"{folder} was trained with another tokenizer, so its weights belong to other tokens"
                remedy = "train it and this run on the same data with the same data.tokenizer"
                raise UserError(f"init_from: {problem}; {remedy}")
