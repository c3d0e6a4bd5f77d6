"""The settings in the files of an exported model: its config and how it generates."""

from typing import Any

from manyformer.data.tokenizer import NativeTokenizer, Tokenizer
from manyformer.interop.auto_classes import LOADER, AutoClass, auto_class_of
from manyformer.interop.foreign_config import MODEL_TYPE, SPEC_FIELD
from manyformer.models import GenerativeModel, Model
from manyformer.models.model_files import GenerationSettings
from manyformer.recipes import get_recipe
from manyformer.version import VERSION


def config_fields(model: Model) -> dict[str, Any]:
    """The content of the config.json of an exported model, without special tokens.

    Sizes have the names that other programs look for. Raises UserError for a kind that `transformers` does not have."""
    kind = auto_class_of(model)
    keywords = model.spec.keywords
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
            fields["suppress_tokens"] = sorted(unwritten - set(special.stop_ids))
    if "incremental_decoding" not in get_recipe(model.spec.recipe).card.promises:
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
