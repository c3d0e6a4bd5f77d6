"""Initialize a model with the weights of an earlier run, e.g. for the next stage of training with longer windows."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.system import temporary_folder
from manyformer.base.type_aliases import LogFn
from manyformer.config import TransferConfig
from manyformer.conversion import load
from manyformer.conversion.surgery.attention_transfer import describe_transfer, transfer_attention
from manyformer.conversion.surgery.conversion import ModelPair
from manyformer.conversion.surgery.lora import is_head
from manyformer.conversion.surgery.recipe_conversions import CONVERSIONS
from manyformer.conversion.surgery.weight_transfer import adapt_tensors, build_saved_structure, describe_changes
from manyformer.data.pipeline.opened import OpenedData
from manyformer.models import Model
from manyformer.models.model_files import GENERATION_FILE, GenerationSettings, fill_weights, read_spec, read_tensors
from manyformer.models.tasks.masked_language_modelling import CLASSES, HEAD, EncoderTask, head_named_in
from manyformer.nn.attention.head_gates import parse_heads, remove_heads, subtract_heads
from manyformer.nn.runtime.training_hooks import OptionalOnLoad, RequiresPretrained, WrapsLoadedModule
from manyformer.recipes import get_recipe, recipe_names
from manyformer.recipes.parts.registry import REMOVED_HEADS, task_of
from manyformer.training.run_folder import model_folder


def load_initial_weights(model: Model, path: str, data: OpenedData) -> str:
    """Load the weights of a saved model, or of the final model of a run, with the same tokenizer into `model`.

    Settings that decide no weights may differ: windows, dropout, the data, and added modules. A position table may have
    fewer rows, or more: the loaded rows are then repeated until it is filled (Beltagy et al. 2020, section 5). Another
    recipe may have the weights of a conversion (`mf.convert`), and more layers or fewer heads those of its rules. An
    encoder with the head of another task, and a classifier with another number of labels, keep their new heads, a
    kernel of another kind its own new tensors. Returns what was loaded, what is new, and which modules compute another
    thing than the trained ones, as a sentence. Raises UserError for weights that do not fit.
    """
    folder = model_folder(path)
    # first, for its sentence about folders of another library
    saved_recipe = read_spec(folder).recipe
    check_tokenizers(folder, data)
    # the weights are renamed and reshaped step by step, and each step adds its sentence
    tensors = _read_without_heads(folder, model)
    sentences = [f"weights initialized from {path}{_describe_keywords(folder, model)}"]
    head = head_named_in(model.spec.keywords)
    saved_head = _saved_head(folder)
    new_part = None
    if head is not None and saved_head is not None and head is not saved_head:
        tensors = _with_new_head(model, tensors)
        new_part = "head"
        sentences[0] += (
            f": embedding and layers are copied, the head for {head.title} is new, that for {saved_head.title} is left"
        )
    elif (counts := _other_class_counts(folder, model)) is not None:
        tensors = _with_new_head(model, tensors)
        new_part = "head"
        sentences[0] += f": the head for {counts[1]} labels is new, that for {counts[0]} is left"
    saved = build_saved_structure(folder)
    if saved is not None:
        sentences += describe_changes(saved, model, new_part)
    conversion = CONVERSIONS.get((saved_recipe, model.spec.recipe))
    tensors, derivations = adapt_tensors(ModelPair.of(saved or nn.Module(), model, tensors), conversion)
    sentences += derivations
    saved_keywords = " ".join(f"{name}={value}" for name, value in _different_keywords(folder, model).items())
    label = f"init_from: {folder}" + (f" ({saved_keywords})" if saved_keywords else "")
    fill_weights(model, _match_weights(model, tensors), label, f"init_from: {folder}")
    # a translation goes on to begin and end its texts as the saved model did
    model.generation = _saved_generation(folder, model)
    return "; ".join(sentences)


def transfer_from(path: str, model: Model, data: OpenedData, config: TransferConfig, log: LogFn) -> str:
    """Transfer attention from a saved model, or from the final model of a run, to new kernels of `model`.

    Returns what was learned, as a sentence; a tenth of the steps at a time is logged. Raises UserError (see
    `transfer_attention`)."""
    assert config.steps is not None
    teacher = load(path).to(model.device)
    total = config.steps

    def log_progress(step: int, loss: float) -> None:
        if step * 10 // total > (step - 1) * 10 // total:
            log(f"attention transfer: step {step}/{total}, loss {loss:.4g}")

    # a share of all rows: the training begins with the first batch in any case
    batches = data.train.shard(0, 1)
    layers = transfer_attention(ModelPair.of(teacher, model), batches, config, log_progress)
    return describe_transfer(layers, config)


def _saved_generation(folder: Path, model: Model) -> GenerationSettings | None:
    """What begins and ends the texts of an imported encoder-decoder, for another one; None without such settings."""
    files = VerifiedFolder.open(folder)
    if GENERATION_FILE not in files or not task_of(model).takes_source:
        return None
    return GenerationSettings.read(files.file(GENERATION_FILE))


def _different_keywords(folder: Path, model: Model) -> dict[str, Any]:
    """The keywords of the saved model that differ from those of `model`, if both have one recipe."""
    spec = read_spec(folder)
    keywords = model.spec.keywords
    if spec.recipe != model.spec.recipe:
        return {}
    return {name: value for name, value in spec.keywords.items() if keywords.get(name) != value}


def _describe_keywords(folder: Path, model: Model) -> str:
    """That the model has the saved keywords, but for the head's and those that are listed; empty for another recipe."""
    if read_spec(folder).recipe != model.spec.recipe:
        return ""
    different = [f"{name}={model.spec.keywords.get(name)}" for name in _different_keywords(folder, model)]
    listed = ", ".join(text for text in different if not text.startswith((f"{HEAD}=", f"{CLASSES}=")))
    return f" with its keywords{' but ' if listed else ''}{listed}"


def _saved_head(folder: Path) -> EncoderTask | None:
    """The task of the head of a saved encoder, which is the default where its keywords name none; None for others."""
    spec = read_spec(folder)
    parameters = get_recipe(spec.recipe).signature.parameters if spec.recipe in recipe_names() else {}
    return head_named_in({HEAD: parameters[HEAD].default, **spec.keywords}) if HEAD in parameters else None


def _other_class_counts(folder: Path, model: Model) -> tuple[int, int] | None:
    """The numbers of labels of the saved model and of `model`, of the same recipe; None if they are equal."""
    saved = read_spec(folder)
    spec = model.spec
    old = saved.keywords.get(CLASSES)
    new = spec.keywords.get(CLASSES)
    if saved.recipe != spec.recipe or old is None or new is None or old == new:
        return None
    return old, new


def _with_new_head(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the saved model but for its head, which is that of `model`."""
    # the other half comes from `model` itself, with the random weights of its new head
    trunk = {name: value for name, value in tensors.items() if not is_head(name.partition(".")[0])}
    return trunk | {name: value for name, value in model.state_dict().items() if is_head(name.partition(".")[0])}


def _read_without_heads(folder: Path, model: Model) -> dict[str, Tensor]:
    """The weights in a folder, without those of the heads that `model` was built without but the saved model has."""
    removed = parse_heads(model.spec.keywords.get(REMOVED_HEADS) or "")
    if not removed:
        return read_tensors(folder)
    saved_model = load(folder)
    remove_heads(saved_model, subtract_heads(removed, parse_heads(saved_model.spec.keywords.get(REMOVED_HEADS) or "")))
    return saved_model.state_dict()


def check_random_init(model: Model) -> None:
    """Check that `model` can be trained from random weights. Raises UserError if a module needs trained weights."""
    for part in model.modules():
        if isinstance(part, RequiresPretrained):
            raise UserError(
                f"{part.requirement}, and there is none: give the folder of a run of that model as init_from"
            )


def _match_weights(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename loaded tensors to their names in `model`, add initial tensors of modules the earlier run lacks."""
    model_tensors = model.state_dict()
    matched = dict(tensors)
    for name, part in model.named_modules():
        if isinstance(part, WrapsLoadedModule):
            prefix = f"{name}."
            wrapped_prefix = f"{name}.{part.wrapped_name}."
            for key in [key for key in matched if key.startswith(prefix) and key not in model_tensors]:
                # a name that exists in both models is left alone
                if (wrapped_key := wrapped_prefix + key.removeprefix(prefix)) in model_tensors:
                    matched[wrapped_key] = matched.pop(key)
        if isinstance(part, OptionalOnLoad):
            # an earlier run may have tensors of another rule or of another number of layers under the same names
            initial = {key: value for key, value in model_tensors.items() if key.startswith(f"{name}.")}
            loaded = {key: matched.pop(key) for key in list(matched) if key.startswith(f"{name}.")}
            fits = initial.keys() == loaded.keys() and all(initial[key].shape == loaded[key].shape for key in initial)
            matched.update(loaded if fits else initial)
    return matched


def check_tokenizers(folder: Path, data: OpenedData) -> None:
    """Raise UserError if the data has other tokenizers than the saved model in a folder."""
    # files are compared as they are saved, whatever kind of tokenizer they hold
    with temporary_folder() as data_folder:
        data.save(data_folder)
        for data_file in sorted(data_folder.glob("tokenizer*.json")):
            model_file = folder / data_file.name
            if not model_file.is_file() or model_file.read_bytes() != data_file.read_bytes():
                problem = f"{folder} was trained with another tokenizer, so its weights belong to other tokens"
                remedy = "leave data.tokenizer and data.vocab out to use its tokenizer, or train both on the same data"
                raise UserError(f"init_from: {problem}; {remedy}")
