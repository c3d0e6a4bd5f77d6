"""Tokenizers and label names as files of a run folder: enough to use a trained model without its data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from manyformer.data.atomic_files import atomic_write_text
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.tokenizer_kinds import load_tokenizer
from manyformer.errors import UserError, suggest_names

_SHARED, _SOURCE, _TARGET, _LABELS = "tokenizer.json", "tokenizer-source.json", "tokenizer-target.json", "labels.json"


class TokenizerPair(NamedTuple):
    """The input tokenizer `source` and the output tokenizer `target`: the same object if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer
    labels: tuple[str, ...] | None = None
    """Label names of a classifier, indexed by class id."""

    def class_ids(self) -> dict[str, int]:
        """The class id of each label."""
        return {label: number for number, label in enumerate(self.labels or ())}

    def save(self, folder: Path) -> None:
        """Write the tokenizers and labels as JSON files into `folder`."""
        if self.source is self.target:
            self.source.save(folder / _SHARED)
        else:
            self.source.save(folder / _SOURCE)
            self.target.save(folder / _TARGET)
        if self.labels is not None:
            atomic_write_text(folder / _LABELS, json.dumps(self.labels, ensure_ascii=False, indent=1) + "\n")


def class_id(class_ids: Mapping[str, int], label: str, location: str) -> int:
    """The class id of a label. Raises UserError with the location for a label that has none."""
    if label not in class_ids:
        suggestion = suggest_names(label, class_ids)
        raise UserError(f"{location}: the label {label!r} does not occur in the training data; {suggestion}")
    return class_ids[label]


def load_tokenizers(folder: str | Path) -> TokenizerPair:
    """Load what `TokenizerPair.save` wrote into `folder`. Raises UserError for a missing or damaged file."""
    root = Path(folder)
    if (root / _SOURCE).exists():
        return TokenizerPair(
            load_tokenizer(root / _SOURCE), load_tokenizer(root / _TARGET), _load_labels(root / _LABELS)
        )
    tokenizer = load_tokenizer(root / _SHARED)
    return TokenizerPair(tokenizer, tokenizer, _load_labels(root / _LABELS))


def _load_labels(path: Path) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: this file is not a complete list of labels ({error})") from error
    return tuple(str(name) for name in names)
