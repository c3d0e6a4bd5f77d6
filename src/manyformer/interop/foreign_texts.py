"""The tokenizers, labels and settings of generation in the folder of a foreign model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from manyformer.data import Tokenizer
from manyformer.data.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.foreign_generation import ForeignGeneration
from manyformer.interop.foreign_tokenizer_files import read_foreign_tokenizers
from manyformer.interop.model_family import ModelFamily
from manyformer.models.generation_settings import GenerationSettings
from manyformer.models.patch_embedding import MAX_PIXEL_VALUE
from manyformer.recipes.registry import get_recipe


class TextSettings(NamedTuple):
    """How the inputs and outputs of a model are read and written, and the settings that are left out, with reasons."""

    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None
    labels: tuple[str, ...] | None = None
    generation: GenerationSettings | None = None
    left_out: Mapping[str, str] = {}


def read_text_settings(config: ForeignConfig, family: ModelFamily, keywords: Mapping[str, Any]) -> TextSettings:
    """The tokenizer of a model with these keywords, the names of its labels, and what begins and ends its texts.

    Raises UserError for a tokenizer with more tokens than the model, and for settings that generation does not have."""
    labels = config.labels() if keywords.get("classes") and not config.is_bare else None
    if "channels" in keywords:
        shape = ImageShape(*(keywords[name] for name in ("height", "width", "channels")))
        return TextSettings(PixelTokenizer(MAX_PIXEL_VALUE + 1, shape), labels)
    if "vocab" not in keywords:
        return TextSettings(labels=labels)
    folder, vocab = config.file.parent, keywords["vocab"]
    tokenizers, generation = read_foreign_tokenizers(folder), ForeignGeneration(folder, vocab)
    for tokenizer, size in zip(tokenizers or (), (keywords.get("source_vocab") or vocab, vocab)):
        if tokenizer.vocab > size:
            raise UserError(f"{folder} has a tokenizer of {tokenizer.vocab:,} tokens, but its model has {size:,}")
    task = get_recipe(family.recipe).card.task
    if not task.takes_source:
        reader, left_out = tokenizers and tokenizers[0], generation.search_options()
        if task.generates is not None:
            left_out |= generation.settings_without_use(reader)
        return TextSettings(reader, labels, left_out=left_out)
    settings = generation.settings()
    pair = tokenizers and (
        tokenizers[0].for_sources(),
        tokenizers[1].for_targets(settings.start, settings.forced_first),
    )
    return TextSettings(pair, labels, settings, generation.search_options())
