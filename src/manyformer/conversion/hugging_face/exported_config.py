"""What the files of an exported model say: the class that loads it, its config, how it generates, its names of weights.

Models without an equal class of `transformers` get one of this library, and `wrapped_family` reads these back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.base import VERSION
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.keyword_checks import checked_keywords
from manyformer.conversion.hugging_face.families import ConfigRule, ModelFamily, TensorRule, same
from manyformer.conversion.hugging_face.hf_folder import MODEL_TYPE, SPEC_FIELD, HFConfig
from manyformer.data.tokenizers.tokenizer import NativeTokenizer, Tokenizer
from manyformer.models import (
    DecisionTransformer,
    EncoderDecoder,
    GenerativeModel,
    ImageClassifier,
    LanguageModel,
    MaskedLM,
    Model,
    SpanReader,
    Tagger,
    TextClassifier,
)
from manyformer.models.model import model_name
from manyformer.models.model_files import GenerationSettings
from manyformer.recipes.parts.registry import build_on_meta, get_recipe, recipe_in_file, task_of

LOADER = "modeling_manyformer"
"""The module in an exported folder that `trust_remote_code` runs."""


class AutoClass(NamedTuple):
    """A kind of models in `transformers`.

    `suffix` ends the names of its classes, and `pipeline` is the hub's name of the kind. Texts that its models read
    begin with the start token if `begins`, and end with the end token if `ends`. Only those that `is_wrapped` have a
    class of this library, the others a class of `transformers` that `AutoModel` loads.
    """

    suffix: str
    pipeline: str
    begins: bool = True
    ends: bool = True
    is_wrapped: bool = True

    @property
    def auto_class(self) -> str:
        """The name of the class that loads such a model."""
        if self.is_wrapped:
            return f"AutoModelFor{self.suffix}"
        return "AutoModel"

    @property
    def architecture(self) -> str:
        """The name of the class of this library's models."""
        return f"ManyformerFor{self.suffix}"


AUTO_CLASSES: dict[type[Model], AutoClass] = {
    LanguageModel: AutoClass("CausalLM", "text-generation", begins=False, ends=False),
    EncoderDecoder: AutoClass("Seq2SeqLM", "text2text-generation", begins=False),
    MaskedLM: AutoClass("MaskedLM", "fill-mask"),
    TextClassifier: AutoClass("SequenceClassification", "text-classification"),
    Tagger: AutoClass("TokenClassification", "token-classification"),
    SpanReader: AutoClass("QuestionAnswering", "question-answering"),
    ImageClassifier: AutoClass("ImageClassification", "image-classification"),
}

NATIVE_CLASSES: dict[type[Model], AutoClass] = {
    DecisionTransformer: AutoClass("DecisionTransformer", "reinforcement-learning", is_wrapped=False),
}
"""The kinds of models that have a class of `transformers`, and none of this library beside it."""


def auto_class_of(model: Model) -> AutoClass:
    """The kind of a model in `transformers`. Raises UserError for one that has none."""
    kind = (AUTO_CLASSES | NATIVE_CLASSES).get(type(model))
    task = task_of(model)
    # captions and transcripts are written by encoder-decoders too, whose sources are no tokens
    if kind is None or (kind.suffix == "Seq2SeqLM" and task.generates != "answer"):
        raise UserError(
            f"{model_name(model)} is for {task.title}; what transformers can have are models of language, translation "
            "and masked text, classifiers of texts, tokens and images, and readers of answers"
        )
    return kind


LOADER_CODE = '''"""Loads this model with manyformer."""

try:
    from manyformer.conversion.hugging_face.auto_model import {names}
except ImportError as error:
    raise ImportError("this model needs the package manyformer: pip install 'manyformer[hf]'") from error
'''


def write_loader(folder: Path) -> None:
    """Write the module that `auto_map` of a config names."""
    names = sorted(["ManyformerConfig", *(kind.architecture for kind in AUTO_CLASSES.values())])
    imported = "(\n" + "".join(f"        {name},\n" for name in names) + "    )"
    atomic_write_text(folder / f"{LOADER}.py", LOADER_CODE.format(names=imported))


def config_fields(model: Model) -> dict[str, Any]:
    """The content of the config.json of an exported model, without special tokens.

    Sizes have the names that other programs look for. Raises UserError for a kind that `transformers` does not have."""
    kind = auto_class_of(model)
    keywords = model.spec.keywords
    # under the names that other programs look for, whatever the recipe calls them
    sizes = {
        "vocab_size": getattr(model, "vocab", keywords.get("vocab")),
        "hidden_size": keywords.get("dim"),
        "num_hidden_layers": keywords.get("depth"),
        "num_attention_heads": keywords.get("heads"),
        "max_position_embeddings": model.max_length,
    }
    return {
        "architectures": [kind.architecture],
        "auto_map": {
            "AutoConfig": f"{LOADER}.ManyformerConfig",
            kind.auto_class: f"{LOADER}.{kind.architecture}",
        },
        "model_type": MODEL_TYPE,
        SPEC_FIELD: spec_fields(model),
        "is_encoder_decoder": kind.suffix == "Seq2SeqLM",
        # weights are shared as the recipe shares them
        "tie_word_embeddings": True,
        **{name: size for name, size in sizes.items() if size is not None},
        **label_fields(model, kind),
    }


def spec_fields(model: Model) -> dict[str, Any]:
    """The recipe and the keywords of a model, from which it can be built again."""
    return {"recipe": model.spec.recipe, "keywords": model.spec.keywords, "version": VERSION}


def label_fields(model: Model, kind: AutoClass) -> dict[str, Any]:
    """The fields of a config with the names of a classifier's classes; none for other models."""
    if not kind.suffix.endswith("Classification"):
        return {}
    # the names that transformers itself gives to labels without any
    names = model.labels or [f"LABEL_{number}" for number in range(model.spec.keywords["classes"])]
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def generation_fields(model: Model) -> dict[str, Any] | None:
    """The settings of `generate` with which it never writes what this library's does not; None if it never writes.

    A language model without a tokenizer has no special tokens. Recipes that do not promise to continue from a state
    read the whole text for each token."""
    if not isinstance(model, GenerativeModel):
        return None
    if auto_class_of(model).suffix == "Seq2SeqLM":
        fields = generation_content(generation_of(model))
    else:
        fields = special_token_ids(model.tokenizer)
        if model.tokenizer is not None:
            special = model.tokenizer
            unwritten = {special.pad, special.bos, *range(special.vocab, model.vocab)}
            # a model may have more outputs than its tokenizer has tokens
            fields["suppress_tokens"] = sorted(unwritten - set(special.stop_ids))
    if "incremental_decoding" not in get_recipe(model.spec.recipe).card.promises:
        # without the promise each token is generated from the whole text
        fields["use_cache"] = False
    return fields


def special_token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ids of the start, end and padding token by the names of their settings; None without a tokenizer."""
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    stop_ids = tokenizer.stop_ids
    return {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": list(stop_ids) if len(stop_ids) > 1 else stop_ids[0],
        "pad_token_id": tokenizer.pad,
    }


def generation_of(model: Model) -> GenerationSettings:
    """The settings of an encoder-decoder; those of one from this library are what its tokenizer says."""
    if model.generation is not None:
        return model.generation
    if isinstance(model.tokenizer, tuple):
        target = model.tokenizer[1]
    else:
        target = model.tokenizer or NativeTokenizer
    # a tokenizer may end texts with its padding or start token, which then must be written
    banned = {target.pad, target.bos} - set(target.stop_ids)
    return GenerationSettings(
        start=target.bos, pad=target.pad, stop_ids=target.stop_ids, banned_ids=tuple(sorted(banned))
    )


def generation_content(settings: GenerationSettings) -> dict[str, Any]:
    """The content of the generation_config.json of an encoder-decoder."""
    content: dict[str, Any] = {
        "decoder_start_token_id": settings.start,
        "pad_token_id": settings.pad,
        "eos_token_id": list(settings.stop_ids) if len(settings.stop_ids) > 1 else settings.stop_ids[0],
        "forced_bos_token_id": settings.forced_first,
        "forced_eos_token_id": settings.forced_last,
        "bad_words_ids": [[token] for token in settings.banned_ids] or None,
    }
    return {name: value for name, value in content.items() if value is not None}


PREFIX = "model."
"""What the names of tensors begin with."""


def stored_names(model: Model) -> list[str]:
    """The names of a model's weights, of shared ones the first."""
    # shared weights are written once, so that a file is no larger than the model
    first_names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_names.setdefault(id(tensor), name)
    return list(first_names.values())


def wrapped_family(config: HFConfig) -> ModelFamily:
    """The family of the only model that a config of this library describes.

    Raises UserError for a recipe that does not exist, and for keywords that are none of it."""
    spec = config.part(SPEC_FIELD)
    recipe = spec.content.get("recipe")
    saved_keywords = spec.part("keywords").content
    if not isinstance(recipe, str):
        raise UserError(f"{config.file}: {SPEC_FIELD}.recipe ({recipe!r:.60}) must be the name of a recipe")
    signature = recipe_in_file(recipe, config.file).signature
    try:
        checked_keywords(recipe, saved_keywords, signature)
    except UserError as error:
        raise UserError(f"{config.file}: {error}") from None

    def tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
        names = stored_names(build_on_meta(recipe, saved_keywords))
        return (same(f"{PREFIX}{name}", name) for name in names)

    return ModelFamily(
        title="manyformer",
        model_types=(MODEL_TYPE,),
        recipe=recipe,
        prefix=PREFIX,
        config_rules=(ConfigRule(lambda config: saved_keywords, dict),),
        tensor_rules=tensor_rules,
    )
