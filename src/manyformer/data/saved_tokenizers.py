"""Tokenizers and label names as a run keeps them: enough to use a trained model without its data."""

import json
from pathlib import Path
from typing import NamedTuple

from manyformer.data.atomic_files import write_text
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError

_SHARED, _SOURCE, _TARGET, _LABELS = "tokenizer.json", "tokenizer-source.json", "tokenizer-target.json", "labels.json"


class TokenizerPair(NamedTuple):
    """`source` reads what goes in, `target` writes what comes out: the same object where a vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer
    labels: tuple[str, ...] | None = None
    """A classifier's answers, by their number."""

    def save(self, folder: Path) -> None:
        """Writes them as JSON files into a folder."""
        if self.source is self.target:
            self.source.save(folder / _SHARED)
        else:
            self.source.save(folder / _SOURCE)
            self.target.save(folder / _TARGET)
        if self.labels is not None:
            write_text(folder / _LABELS, json.dumps(self.labels, ensure_ascii=False, indent=1) + "\n")


def load_tokenizers(folder: str | Path) -> TokenizerPair:
    """What `TokenizerPair.save` wrote into this folder; UserError names what is missing or damaged."""
    place = Path(folder)
    if (place / _SOURCE).exists():
        return TokenizerPair(Tokenizer.load(place / _SOURCE), Tokenizer.load(place / _TARGET), _labels(place / _LABELS))
    both = Tokenizer.load(place / _SHARED)
    return TokenizerPair(both, both, _labels(place / _LABELS))


def _labels(path: Path) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: this is not a whole list of labels ({error})") from error
    return tuple(str(name) for name in names)
