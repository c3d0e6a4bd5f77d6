"""Weights of an earlier run as the beginning of another, such as the next stage of a training with longer windows."""

import tempfile
from pathlib import Path

from torch import Tensor

from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.models.model_files import fill, read_tensors
from manyformer.position import LearnedPosition
from manyformer.train.data_protocols import TrainingDataProtocol
from manyformer.training_hooks import OptionalOnLoad, RequiresPretrained, WrapsLoadedModule


def load_initial_weights(model: Model, path: str, data: TrainingDataProtocol) -> None:
    """Fill `model` with the weights of a saved model, or of the final model of a run, for the same tokenizer.

    What is no weight may differ: windows, dropout, the data, and parts that are added. A table of positions may have
    grown; it then begins with the old one, and repeats it as often as it takes (Beltagy et al. 2020, section 5). Raises
    UserError for whatever does not fit.
    """
    folder = Path(path)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    _same_tokenizers(folder, data)
    tensors = read_tensors(folder)
    for name, part in model.named_modules():
        table = f"{name}.weight"
        if isinstance(part, LearnedPosition) and table in tensors:
            tensors[table] = _repeated(tensors[table], part.weight.shape[0])
    fill(model, _fitted(model, tensors), f"start: {folder}")


def check_random_init(model: Model) -> None:
    """Leave `model` as it was drawn. Raises UserError where a part of it can only learn from a trained model."""
    for part in model.modules():
        if isinstance(part, RequiresPretrained):
            raise UserError(f"{part.requirement}, and there is none: give the folder of a run of that model as start")


def _fitted(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names that they have in `model`, with its own where an earlier run had no such part."""
    own, found = model.state_dict(), dict(tensors)
    for name, part in model.named_modules():
        if isinstance(part, WrapsLoadedModule):
            outside, inside = f"{name}.", f"{name}.{part.wrapped_name}."
            for key in [key for key in found if key.startswith(outside) and key not in own]:
                if (moved := inside + key.removeprefix(outside)) in own:
                    found[moved] = found.pop(key)
        if isinstance(part, OptionalOnLoad):
            # what an earlier run had in its place is another rule's, or that of another number of layers
            mine = {key: value for key, value in own.items() if key.startswith(f"{name}.")}
            known = {key: found.pop(key) for key in list(found) if key.startswith(f"{name}.")}
            fits = mine.keys() == known.keys() and all(mine[key].shape == known[key].shape for key in mine)
            found.update(known if fits else mine)
    return found


def _repeated(table: Tensor, rows: int) -> Tensor:
    if rows <= table.shape[0]:
        return table
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _same_tokenizers(folder: Path, data: TrainingDataProtocol) -> None:
    with tempfile.TemporaryDirectory() as drafts:
        data.save(Path(drafts))
        for mine in sorted(Path(drafts).glob("tokenizer*.json")):
            other = folder / mine.name
            if not other.is_file() or other.read_bytes() != mine.read_bytes():
                raise UserError(
                    f"start: {folder} was trained with another tokenizer, so its weights mean other tokens; train it "
                    f"and this run on the same data with the same data.tokenizer"
                )
