"""What is known of a family of foreign models: the recipe that equals it, its settings, and its tensors."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.tensor_rules import TensorRule

Keywords = dict[str, Any]

PAD_ID = "pad_id"
"""The entry, beside the keywords, of the id of padding: some families number positions from it."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Models of `transformers` that equal a recipe.

    `read_keywords` makes keywords of a config and the names of all tensors, and raises UserError for settings that the
    recipe does not have. `rules` are those of all tensors of a model with these keywords and `PAD_ID`. Files of the
    model without its head lack `prefix`. Tensors whose names match a key of `left_out` are not needed, for the reason
    that is its value; `old_names` replaces parts of names that match a key, unless there is a tensor of the new name.
    `write_config` makes the config of an equal model from the keywords and `PAD_ID`, and raises UserError if there is
    none; `other_files` are the JSON files that stand beside it. Where `head_is_optional`, a model without a head gets a
    new one.
    """

    title: str
    model_types: tuple[str, ...]
    recipe: str
    prefix: str
    read_keywords: Callable[[ForeignConfig, Collection[str]], Keywords]
    rules: Callable[[Mapping[str, Any]], Iterable[TensorRule]]
    write_config: Callable[[Mapping[str, Any]], Keywords]
    left_out: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)
    head_is_optional: bool = False
    other_files: Callable[[Mapping[str, Any]], Mapping[str, Keywords]] = lambda keywords: {}

    def reason_to_leave_out(self, name: str) -> str | None:
        """Why the model does not need a tensor; None if nothing is known of it."""
        return next((reason for pattern, reason in self.left_out.items() if re.fullmatch(pattern, name)), None)

    def complete_names(self, names: Collection[str]) -> dict[str, str]:
        """From the names that `rules` have to those of the tensors in files."""
        is_bare = not any(name.startswith(self.prefix) for name in names)
        complete = {f"{self.prefix}{name}" if is_bare else name: name for name in names}
        for old_name in list(complete):
            new_name = old_name
            for pattern, replacement in self.old_names.items():
                new_name = re.sub(pattern, replacement, new_name)
            if new_name not in complete:
                complete[new_name] = complete.pop(old_name)
        return complete
