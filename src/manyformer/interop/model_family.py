"""What is known of a family of foreign models: the recipe that equals it, its settings, and its tensors."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyformer.interop.config_rules import ConfigRule, Keywords
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.tensor_rules import TensorRule

PAD_ID = "pad_id"
"""The entry, beside the keywords, of the id of padding: some families number positions from it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """Models of `transformers` that equal a recipe.

    `config_rules` are those of all settings, and `tensor_rules` makes those of all tensors of a model with these
    keywords and `PAD_ID`. Files of the model without its head lack `prefix`. Tensors whose names match a key of
    `left_out` are not needed, for the reason that is its value; `old_names` replaces parts of names that match a key,
    unless there is a tensor of the new name. `other_files` are the JSON files that stand beside the config. Where
    `head_is_optional`, a model without a head gets a new one.
    """

    title: str
    model_types: tuple[str, ...]
    recipe: str
    prefix: str
    config_rules: Sequence[ConfigRule]
    tensor_rules: Callable[[Mapping[str, Any]], Iterable[TensorRule]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)
    head_is_optional: bool = False
    other_files: Callable[[Mapping[str, Any]], Mapping[str, Keywords]] = lambda keywords: {}

    def read_keywords(self, config: ForeignConfig) -> Keywords:
        """The keywords of a model with this config. Raises UserError for settings that the recipe does not have."""
        keywords: Keywords = {}
        for rule in self.config_rules:
            keywords |= rule.read(config)
        return keywords

    def write_config(self, keywords: Mapping[str, Any]) -> Keywords:
        """The config of the equal model, from the keywords and `PAD_ID`. Raises UserError if there is none."""
        fields: Keywords = {}
        for rule in self.config_rules:
            fields |= rule.write(keywords)
        return fields

    def reason_to_leave_out(self, name: str) -> str | None:
        """Why the model does not need a tensor; None if nothing is known of it."""
        return next((reason for pattern, reason in self.left_out.items() if re.fullmatch(pattern, name)), None)

    def complete_names(self, names: Collection[str]) -> dict[str, str]:
        """From the names that the rules have to those of the tensors in files."""
        is_bare = not any(name.startswith(self.prefix) for name in names)
        complete = {f"{self.prefix}{name}" if is_bare else name: name for name in names}
        for old_name in list(complete):
            new_name = old_name
            for pattern, replacement in self.old_names.items():
                new_name = re.sub(pattern, replacement, new_name)
            if new_name not in complete:
                complete[new_name] = complete.pop(old_name)
        return complete
