"""This library's models in `transformers`: their config, their base class, and runs as `from_pretrained` reads them."""

import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from manyformer.base.errors import UserError
from manyformer.base.files import SHARED_TOKENIZER, SOURCE_TOKENIZER
from manyformer.base.files.json_records import read_json
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.conversion.hugging_face.exported_config import (
    AUTO_CLASSES,
    PREFIX,
    auto_class_of,
    config_fields,
    generation_fields,
    special_token_ids,
    write_loader,
)
from manyformer.conversion.hugging_face.hf_folder import MODEL_TYPE
from manyformer.conversion.hugging_face.tokenizer_exchange import write_tokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models import Model
from manyformer.models.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    GenerationSettings,
    read_tensors,
    warn_non_finite_tensors,
)
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.recipes.parts.registry import build, build_on_meta, read_saved_recipe


class ManyformerConfig(PreTrainedConfig):
    """The recipe of a model and its keywords, which are all that building it needs."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    manyformer: dict[str, Any] | None = None
    """The recipe, its keywords and the version of this library."""
    tie_word_embeddings: bool = True

    def build(self) -> Model:
        """A new model of the recipe. Raises UserError for a config without one."""
        if self.manyformer is None:
            raise UserError("the config names no recipe: load it from an exported folder or a run")
        return build(self.manyformer["recipe"], **self.manyformer["keywords"])

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `auto_map` names a module that imports this class, which therefore is not copied."""


class SavedModel:
    """A saved model of this library in a folder, and what `transformers` asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def at(cls, name: Any) -> "SavedModel | None":
        """The model in a folder of a run or of a saved model; None for all other names."""
        if not isinstance(name, str | os.PathLike):
            return None
        for folder in (Path(name), Path(name) / "model"):
            if (file := folder / CONFIG_FILE).is_file():
                content = read_json(file, "the description of a model")
                if isinstance(content, dict) and "recipe" in content:
                    return cls(folder)
                return None
        return None

    @cached_property
    def tokenizers(self) -> TokenizerPair | None:
        """Its tokenizers and the names of its labels; None if it was saved without."""
        files = VerifiedFolder.open(self.folder)
        if SHARED_TOKENIZER in files or SOURCE_TOKENIZER in files:
            return load_tokenizers(self.folder)
        return None

    @cached_property
    def empty_model(self) -> Model:
        """The model without values, with its tokenizers, labels and settings of generation."""
        recipe, keywords = read_saved_recipe(self.folder)
        pair = self.tokenizers
        try:
            model = build_on_meta(recipe.card.name, keywords)
        except UserError as error:
            raise UserError(f"{self.folder / CONFIG_FILE}: {error}") from None
        if pair is not None:
            if pair.source is pair.target:
                model.tokenizer = pair.source
            else:
                model.tokenizer = (pair.source, pair.target)
            model.labels = pair.labels
        files = VerifiedFolder.open(self.folder)
        if GENERATION_FILE in files:
            model.generation = GenerationSettings.read(files.file(GENERATION_FILE))
        return model

    def config(self) -> dict[str, Any]:
        """The fields of its config."""
        pair = self.tokenizers
        return config_fields(self.empty_model) | special_token_ids(pair.target if pair else None)

    def generation_config(self) -> GenerationConfig | None:
        """How it generates; None if it does not."""
        fields = generation_fields(self.empty_model)
        if fields is None:
            return None
        return GenerationConfig(**fields)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of its inputs. Raises UserError if it has none."""
        pair = self.tokenizers
        model = self.empty_model
        if pair is None or not isinstance(pair.source, Tokenizer):
            raise UserError(f"{self.folder} was saved without a tokenizer")
        write_tokenizer(folder, pair.source, auto_class_of(model), model.max_length)


class ManyformerTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a run or a saved model, for `AutoTokenizer`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        saved = SavedModel.at(pretrained_model_name_or_path)
        if saved is None:
            return super().from_pretrained(pretrained_model_name_or_path, *inputs, **options)
        with tempfile.TemporaryDirectory() as folder:
            saved.write_tokenizer(Path(folder))
            return PreTrainedTokenizerFast.from_pretrained(folder, *inputs, **options)


def let_auto_config_read_runs() -> None:
    """Extend `AutoConfig.from_pretrained`, which all `AutoModel` classes call first, by folders of this library.

    These have no `model_type`, without which `transformers` cannot choose a class. All other names are passed on."""
    original = AutoConfig.from_pretrained

    def from_pretrained(pretrained_model_name_or_path: Any, **options: Any) -> Any:
        saved = SavedModel.at(pretrained_model_name_or_path)
        if saved is None:
            return original(pretrained_model_name_or_path, **options)
        _, unused = ManyformerConfig.get_config_dict(saved.folder, **options)
        # no code of the folder is run, so these say nothing here
        for name in ("trust_remote_code", "code_revision"):
            unused.pop(name, None)
        return ManyformerConfig.from_dict(saved.config(), **unused)

    AutoConfig.from_pretrained = from_pretrained  # type: ignore[method-assign]


class ManyformerModel(PreTrainedModel):
    """A model of this library as a `PreTrainedModel`: `model` is the one that the recipe of the config builds.

    Outputs and losses are those that `transformers` has for the kind of model. Auxiliary losses that layers return
    are added to the loss."""

    config_class = ManyformerConfig
    base_model_prefix = PREFIX.rstrip(".")
    supports_gradient_checkpointing = False
    model_class: ClassVar[type[Model]]
    """The class of `model`."""

    def __init__(self, config: ManyformerConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        for weight in self.model.parameters():
            # some recipes compute initial values in float32 whatever the default is
            weight.data = weight.data.to(torch.get_default_dtype())
        # AutoModel classes are chosen by the user, and the recipe decides which of them fits
        if type(self.model) is not self.model_class:
            kind = AUTO_CLASSES.get(type(self.model))
            fitting = kind.auto_class if kind else "no class"
            raise UserError(f"the model is none of {type(self).__name__}; {fitting} loads it")
        first_names: dict[int, str] = {}
        # transformers saves a tied weight under its first name and ties the others when it loads
        self._tied_weights_keys = {
            name: first_names[id(weight)]
            for name, weight in self.named_parameters(remove_duplicate=False)
            if first_names.setdefault(id(weight), name) != name
        }
        # transformers builds on the meta device and fills from files; what no file has is drawn later (_init_weights)
        self._is_empty = next(self.parameters()).is_meta
        self._drawn: Model | None = None
        self.post_init()

    @classmethod
    def wrap(cls, model: Model, config: ManyformerConfig) -> Self:
        """A model as it is, with its weights."""
        with torch.device("meta"):
            wrapper = cls(config)
        wrapper.model = model
        # the weights are those of the model: nothing is left to draw
        wrapper._is_empty = False
        wrapper.train(model.training)
        return wrapper

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        """The model in an exported folder, a run, or a folder of a saved model of this library."""
        saved = SavedModel.at(pretrained_model_name_or_path)
        if saved is None:
            return super().from_pretrained(pretrained_model_name_or_path, *inputs, **options)
        tensors = {f"{PREFIX}{name}": tensor for name, tensor in read_tensors(saved.folder).items()}
        warn_non_finite_tensors(tensors, saved.folder)
        config = options.pop("config", None) or ManyformerConfig(**saved.config())
        loaded = super().from_pretrained(None, *inputs, config=config, state_dict=tensors, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.generation_config = saved.generation_config()
        return loaded

    def initialize_weights(self) -> None:
        super().initialize_weights()
        object.__setattr__(self, "_drawn", None)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give a module whose weights are in no file, or that has tables in none, those of a newly built model."""
        if not self._is_empty or module is self:
            return
        if self._drawn is None:
            # drawn once for all missing weights, and without changing the random numbers of the program
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                object.__setattr__(self, "_drawn", self.config.build())
        assert self._drawn is not None
        source = self._drawn.get_submodule(self._module_names[module])
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not getattr(tensor, "_is_hf_initialized", False):
                tensor.copy_(getattr(source, name))

    @property
    def _module_names(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    def get_input_embeddings(self) -> nn.Module:
        embed: nn.Module = self.model.get_submodule("embed_target" if self.config.is_encoder_decoder else "embed")
        return getattr(embed, "token", embed)

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> Any:
        raise UserError("the vocabulary is a keyword of the recipe: build the model with another vocab instead")

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *arguments, **options)
        write_loader(Path(save_directory))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: `auto_map` names a module that imports this class, which therefore is not copied."""


def segments_of(mask: Tensor | None, length: int) -> Tensor | None:
    """The segment ids of the last `length` tokens of an attention mask (b, l); None without padding among them.

    Raises UserError for a mask of pairs of tokens, which the recipe decides."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise UserError(
            f"attention_mask has {mask.ndim} axes, but which tokens attend to which is the recipe's: give 2"
        )
    segments = mask[:, mask.shape[1] - length :].long() - 1
    # None lets layers take their paths without padding
    if bool(segments.any()):
        return segments
    return None


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for an option of `forward` that has a value and no meaning here."""
    for name, value in options.items():
        if value is not None and value is not False and name not in ("num_items_in_batch", "return_dict"):
            raise UserError(f"{name} is {value!r:.60}, which models of manyformer do not have: leave it out")


def label_loss(logits: Tensor, labels: Tensor | None, options: Mapping[str, Any], auxiliary: Tensor | float) -> Any:
    """The mean cross-entropy of all labels but -100, with auxiliary losses; None without labels.

    The `Trainer` gives the number of labels of several batches as `num_items_in_batch`."""
    if labels is None:
        return None
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    count = options.get("num_items_in_batch")
    return total / ((labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count) + auxiliary
