"""The folder of a pruned run: its model, and a run file with which it is trained on."""

import copy
from pathlib import Path

from manyformer.api import load
from manyformer.config import RUN_FILE, RunConfig, dump_run
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import TrainedRun
from manyformer.files.atomic_files import atomic_write_text, report_disk_full
from manyformer.models import Model
from manyformer.models.model_files import copy_tokenizers, replacement_folder
from manyformer.multi_head.head_gates import RemovedHeads, add_heads, format_heads, parse_heads, remove_heads
from manyformer.recipes.attention_keywords import REMOVED_HEADS


def prune_heads(model: Model, removed: RemovedHeads) -> Model:
    """A copy of `model` without these heads, as `prune_heads(model, {"encoder.0.attention": [1, 3]})`.

    It computes what the model computes with the gates of these heads at 0, can be trained, saved and checked like any
    model, and its spec has the heads in `removed_heads`, numbered as the recipe numbers them. A layer without any head
    left becomes the bias of its output projection. Raises UserError for heads that do not exist or cannot be removed,
    and for a recipe that does not choose a number of heads."""
    check_prunable(model)
    keywords = model.spec.keywords
    pruned = copy.deepcopy(model)
    remove_heads(pruned, removed)
    text = format_heads(add_heads(parse_heads(keywords[REMOVED_HEADS] or ""), removed))
    pruned.spec = model.spec._replace(keywords={**keywords, REMOVED_HEADS: text or None})
    return pruned


def check_prunable(model: Model) -> None:
    """Raise UserError for a model of a recipe without `removed_heads`, which could not be built without some heads."""
    if REMOVED_HEADS not in model.spec.keywords:
        raise UserError(f"{model.spec.recipe} does not choose a number of heads, so none of them can be removed")


def write_pruned_run(out: Path, trained: TrainedRun, weights: Path, removed: RemovedHeads) -> Model:
    """Write the run `trained` with the `weights` of another run, or its own, and without these heads into `out`."""
    model = prune_heads(load(weights), removed)
    settings = trained.config.model_dump(mode="json", by_alias=True)
    settings["model"][REMOVED_HEADS] = model.spec.keywords[REMOVED_HEADS]
    config = RunConfig.model_validate({**settings, "init_from": str(weights), "out": str(out)})
    with report_disk_full(f"the pruned model in {out}"), replacement_folder(out / "model") as folder:
        copy_tokenizers(weights / "model", folder)
        atomic_write_text(folder / RUN_FILE, dump_run(config))
        model.write_files(folder)
    atomic_write_text(out / RUN_FILE, dump_run(config))
    return model
