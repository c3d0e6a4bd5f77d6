"""Tokenizers by the names of their kinds, trained or loaded, and as files of a run folder with the names of labels.

A run's model is used with these files, without its data, and another run may take its tokenizers from them."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files import LABELS, SHARED_TOKENIZER, SOURCE_TOKENIZER, TARGET_TOKENIZER
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.json_records import DamagedFile, read_json, validate_json
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import MANIFEST, VerifiedFolder
from manyformer.config import EncodedTextData
from manyformer.data.audio.log_mel import LogMelFrontEnd
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.native_tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, WordTokenizer
from manyformer.data.tokenizers.pixel_tokenizer import PixelTokenizer
from manyformer.data.tokenizers.tokenizer import NoTokenizer, Tokenizer

MAX_TOKENIZER_BYTES = 1 << 29
"""The largest file of a tokenizer or of labels that is read."""

TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        *(CharTokenizer, ByteTokenizer, BPETokenizer, WordTokenizer),
        *(PixelTokenizer, LogMelFrontEnd, NoTokenizer, ForeignTokenizer),
    )
}


def train_tokenizer(kind: str, texts: Iterable[str], size: int | None = None) -> Tokenizer:
    """Train a tokenizer of this kind ("char", "byte", "bpe", "word") on `texts`; `size` is the vocabulary size."""
    return _tokenizer_class(kind).learn(texts, size)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load what `Tokenizer.save` wrote. Raises DamagedFile for a missing or damaged file."""
    content = read_json(Path(path), "a tokenizer", max_bytes=MAX_TOKENIZER_BYTES)
    try:
        return _tokenizer_class(content.pop("kind")).restore(content)
    # what `restore` of any kind raises for content of another shape
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: it is not a complete tokenizer ({error})") from error


def _tokenizer_class(kind: str) -> type[Tokenizer]:
    if kind not in TOKENIZERS:
        raise UserError(f"there is no tokenizer {kind!r}; {suggest_names(str(kind), TOKENIZERS)}")
    return TOKENIZERS[kind]


class TokenizerPair(NamedTuple):
    """The input tokenizer `source` and the output tokenizer `target`: the same object if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer
    labels: tuple[str, ...] | None = None
    """Label names of a classifier, indexed by class id."""

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal tokenizers and labels."""
        text = json_text([self.source.fingerprint, self.target.fingerprint, self.labels], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def class_ids(self) -> dict[str, int]:
        """The class id of each label."""
        return {label: number for number, label in enumerate(self.labels or ())}

    def save(self, folder: Path) -> None:
        """Write the tokenizers and labels as JSON files into `folder`."""
        # one file says that both sides share one tokenizer, which `load_tokenizers` restores as one object
        if self.source is self.target:
            self.source.save(folder / SHARED_TOKENIZER)
        else:
            self.source.save(folder / SOURCE_TOKENIZER)
            self.target.save(folder / TARGET_TOKENIZER)
        if self.labels is not None:
            atomic_write_text(folder / LABELS, json_text(self.labels, indent=1) + "\n")


def class_id(class_ids: Mapping[str, int], label: str, location: str) -> int:
    """The class id of a label. Raises UserError with the location for a label that has none."""
    if label not in class_ids:
        suggestion = suggest_names(label, class_ids)
        raise UserError(f"{location}: the label {label!r} does not occur in the training data; {suggestion}")
    return class_ids[label]


def load_tokenizers(folder: str | Path | VerifiedFolder) -> TokenizerPair:
    """Load what `TokenizerPair.save` wrote into a folder with a manifest. Raises DamagedFile."""
    files = VerifiedFolder.of(Path(folder) if isinstance(folder, str) else folder)
    labels: tuple[str, ...] | None = None
    if LABELS in files:
        path = files.file(LABELS)
        labels = validate_json(
            read_json(path, "a list of labels", max_bytes=MAX_TOKENIZER_BYTES), tuple[str, ...], path
        )
    if SOURCE_TOKENIZER in files:
        return TokenizerPair(
            load_tokenizer(files.file(SOURCE_TOKENIZER)), load_tokenizer(files.file(TARGET_TOKENIZER)), labels
        )
    tokenizer = load_tokenizer(files.file(SHARED_TOKENIZER))
    return TokenizerPair(tokenizer, tokenizer, labels)


def section_tokenizer(data: EncodedTextData, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of the run `data.tokenizer_of`, or one trained on `texts`. Raises UserError for no such run."""
    if data.tokenizer_of is None:
        return train_tokenizer(data.tokenizer, texts, data.vocab)
    return borrowed_tokenizers(data.tokenizer_of).source


def borrowed_tokenizers(run: str) -> TokenizerPair:
    """The tokenizers of a run or of a saved model. Raises UserError for a folder with neither."""
    folder = Path(run)
    # a run keeps the tokenizers of its final model in a folder; a saved model is that folder
    if (folder / "model").is_dir():
        folder = folder / "model"
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"data.tokenizer_of: {run} is neither a run with a final model nor a saved model; "
            "`manyformer import` makes one of a folder of transformers"
        )
    return load_tokenizers(folder)


def describe_tokenizer(data: EncodedTextData) -> str:
    """A description of the tokens for display, such as "bpe tokens"."""
    if data.tokenizer_of is None:
        return f"{data.tokenizer} tokens"
    return f"the tokens of {data.tokenizer_of}"
