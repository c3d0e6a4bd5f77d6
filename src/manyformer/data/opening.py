"""Opening the data of a run: from its `data` section to batches."""

from pathlib import Path

from manyformer.config import DataConfig, ImagesData, LabelsData, PairsData, SyntheticData, TextData, TreesData
from manyformer.data.open_images import open_images
from manyformer.data.open_labels import open_labels
from manyformer.data.open_pairs import open_pairs
from manyformer.data.open_synthetic import open_synthetic
from manyformer.data.open_text import open_text
from manyformer.data.open_trees import open_trees
from manyformer.data.opened import OpenedData
from manyformer.errors import UserError
from manyformer.type_aliases import LogFn

_SECTIONS_BY_TASK: dict[str, tuple[type[DataConfig], ...]] = {
    "language-model": (TextData, SyntheticData, ImagesData),
    "masked-lm": (TextData,),
    "translation": (PairsData,),
    "classification": (LabelsData,),
    "tagging": (TreesData,),
    "image-classification": (ImagesData,),
}


def _no_log(line: str) -> None:
    pass


def open_data(
    data: DataConfig,
    task: str,
    *,
    batch_tokens: int,
    cache: Path,
    seed: int,
    model_max_length: int | None = None,
    log: LogFn = _no_log,
) -> OpenedData:
    """Open the data of a run for a `task`, such as "language-model" or "image-classification" (a card's `task`).

    `batch_tokens` is the maximum of padded tokens in a batch, `cache` the folder of prepared data; `log` receives a
    line for each step that takes long. Raises UserError for any defect of the data.
    """
    sections = _SECTIONS_BY_TASK[task]
    if not isinstance(data, sections):
        kind = sections[0].model_fields["kind"].default
        raise UserError(f"data.kind is {data.kind}, but a recipe for {task} learns from {kind}; set data.kind={kind}")
    cache.mkdir(parents=True, exist_ok=True)
    opened = _open_section(data, task, batch_tokens, cache, seed, log)
    opened.check_length(model_max_length)
    return opened


def _open_section(data: DataConfig, task: str, batch_tokens: int, cache: Path, seed: int, log: LogFn) -> OpenedData:
    match data:
        case TextData():
            return open_text(data, task, batch_tokens=batch_tokens, cache=cache, seed=seed, log=log)
        case PairsData():
            return open_pairs(data, batch_tokens=batch_tokens, cache=cache, seed=seed, log=log)
        case LabelsData():
            return open_labels(data, batch_tokens=batch_tokens, cache=cache, seed=seed, log=log)
        case SyntheticData():
            return open_synthetic(data, batch_tokens=batch_tokens, cache=cache, seed=seed)
        case TreesData():
            return open_trees(data, batch_tokens=batch_tokens, cache=cache, seed=seed, log=log)
        case ImagesData():
            return open_images(data, task, batch_tokens=batch_tokens, cache=cache, seed=seed, log=log)
