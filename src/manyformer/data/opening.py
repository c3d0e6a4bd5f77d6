"""The way in: from the `data` section of a run to batches."""

from collections.abc import Callable
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

_KINDS: dict[str, tuple[type[DataConfig], ...]] = {
    "language-model": (TextData, SyntheticData, ImagesData),
    "masked": (TextData,),
    "translation": (PairsData,),
    "classification": (LabelsData,),
    "tagging": (TreesData,),
    "image-classification": (ImagesData,),
}


def _silent(line: str) -> None:
    pass


def open_data(
    data: DataConfig,
    task: str,
    *,
    batch_tokens: int,
    cache: Path,
    seed: int,
    model_longest: int | None = None,
    say: Callable[[str], None] = _silent,
) -> OpenedData:
    """The data of a run for a `task`, such as "language-model" or "image-classification" (a card's `task`).

    `batch_tokens` is the most padded tokens of a batch; `cache` the folder for what is prepared once; `say` is told of
    steps that take long. Raises UserError, one sentence, for whatever is wrong with the data.
    """
    wanted = _KINDS[task]
    if not isinstance(data, wanted):
        kind = wanted[0].model_fields["kind"].default
        raise UserError(f"data.kind is {data.kind}, but a recipe for {task} learns from {kind}; set data.kind={kind}")
    cache.mkdir(parents=True, exist_ok=True)
    opened = _opened(data, task, batch_tokens, cache, seed, say)
    opened.check_length(model_longest)
    return opened


def _opened(
    data: DataConfig, task: str, batch_tokens: int, cache: Path, seed: int, say: Callable[[str], None]
) -> OpenedData:
    match data:
        case TextData():
            return open_text(data, task, batch_tokens=batch_tokens, cache=cache, seed=seed, say=say)
        case PairsData():
            return open_pairs(data, batch_tokens=batch_tokens, cache=cache, seed=seed, say=say)
        case LabelsData():
            return open_labels(data, batch_tokens=batch_tokens, cache=cache, seed=seed, say=say)
        case SyntheticData():
            return open_synthetic(data, batch_tokens=batch_tokens, cache=cache, seed=seed)
        case TreesData():
            return open_trees(data, batch_tokens=batch_tokens, cache=cache, seed=seed, say=say)
        case ImagesData():
            return open_images(data, task, batch_tokens=batch_tokens, cache=cache, seed=seed, say=say)
