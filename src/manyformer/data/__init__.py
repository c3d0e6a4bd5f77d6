"""Opening the data of a run: from files, data sets, default corpora or generators to batches of any kind."""

import importlib
import pkgutil
from pathlib import Path

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.atomic_files import make_folder
from manyformer.base.type_aliases import LogFn
from manyformer.config import DataSection
from manyformer.data.batching.epochs import HeldOutBatches, Sampler, TrainingFeed
from manyformer.data.pipeline.data_paths import check_paths, files_at, is_plain_path, named_paths
from manyformer.data.pipeline.kind import HELD_OUT_SPLITS, DataKind, OpenRequest, kind_of, no_log, register
from manyformer.data.pipeline.opened import DataSurvey, EvaluationData, EvaluationPath, HeldOutExample, OpenedData
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizers.tokenizer import StreamDecoder, Tokenizer
from manyformer.nn.batches import TextUnits

__all__ = [
    "DataKind",
    "HeldOutBatches",
    "HeldOutExample",
    "OpenRequest",
    "OpenedData",
    "Sampler",
    "StreamDecoder",
    "TextUnits",
    "Tokenizer",
    "TokenizerPair",
    "TrainingFeed",
    "load_tokenizers",
    "open_data",
    "register",
]
SURVEYED_BYTES = 1 << 26
"""Data of kinds that are opened as a whole is looked at if its files have no more bytes than this."""


def open_data(
    data: DataSection,
    form: str,
    *,
    batch_tokens: int,
    cache: Path,
    seed: int,
    model_max_length: int | None = None,
    belongs_to_model: bool = False,
    log: LogFn = no_log,
) -> OpenedData:
    """Open the data of a run in a `form` of its kind, such as "next-token" or "labelled" (a task's `data_forms`).

    `batch_tokens` is the maximum of padded tokens in a batch, `cache` the folder of prepared data; `log` receives a
    line for each step that takes long. With `belongs_to_model` prepared data is not replaced by different data. Raises
    UserError for any defect of the data.
    """
    kind = kind_of(data)
    kind.check_form(form)
    make_folder(cache)
    opened = kind.open(data, form, OpenRequest(batch_tokens, cache, seed, log, belongs_to_model))
    opened.check_length(model_max_length)
    return opened


def survey_data(data: DataSection, form: str, request: OpenRequest) -> DataSurvey:
    """A look at the data of a run, bounded in time; `request.cache` is a folder for what it needs.

    Data that is generated or can be read only once is not touched, nor are large files of kinds whose beginning says
    nothing. Raises UserError for what training would refuse, such as a path that leads nowhere.
    """
    kind = kind_of(data)
    kind.check_form(form)
    check_paths(data)
    paths = named_paths(data)
    if special := [path for path in paths if not is_plain_path(path)]:
        return DataSurvey((("data", f"{', '.join(special)}: read when training starts"),))
    if kind.survey is not None:
        return kind.survey(data, form, request)
    size = sum(file.stat().st_size for path in paths for file in files_at(path))
    if not paths or size > SURVEYED_BYTES:
        return DataSurvey(
            (("data", f"{', '.join(paths)}: {size:,} bytes, read when training starts"),) if paths else ()
        )
    return DataSurvey.of_all(kind.open(data, form, request))


def open_held_out(data: DataSection, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """A split that the run with the prepared data in `request.cache` held out, by default test if there is one.

    The data comes from the prepared files; if they are missing, the data is prepared again. Raises UserError.
    """
    if split not in (None, *HELD_OUT_SPLITS):
        raise UserError(f"there is no split '{split}' to score; {suggest_names(str(split), HELD_OUT_SPLITS)}")
    make_folder(request.cache)
    return kind_of(data).held_out(data, form, request, split)


def open_file(
    data: DataSection, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """Data of the same kind in a file, or in two parallel ones; `request.cache` is a folder for its shards."""
    return kind_of(data).from_file(data, form, tokenizers, path, request)


def _register_kinds() -> None:
    """Import every module `open_*` of this package, each of which registers its kind of data."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if module.name.rpartition(".")[2].startswith("open_"):
            importlib.import_module(module.name)


_register_kinds()
