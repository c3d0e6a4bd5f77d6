"""The tokenizer of a data section: trained on its texts, or that of an earlier run."""

from collections.abc import Iterable
from pathlib import Path

from manyformer.config import EncodedTextData
from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.tokenizer_kinds import train_tokenizer
from manyformer.errors import UserError
from manyformer.files.verified_folder import MANIFEST


def section_tokenizer(data: EncodedTextData, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of the run `data.tokenizer_of`, or one trained on `texts`. Raises UserError for no such run."""
    if data.tokenizer_of is None:
        return train_tokenizer(data.tokenizer, texts, data.vocab)
    return borrowed_tokenizers(data.tokenizer_of).source


def borrowed_tokenizers(run: str) -> TokenizerPair:
    """The tokenizers of a run or of a saved model. Raises UserError for a folder with neither."""
    folder = Path(run)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"data.tokenizer_of: {run} is neither a run with a final model nor a saved model; "
            "`manyformer import` makes one of a folder of transformers"
        )
    return load_tokenizers(folder)


def describe_tokenizer(data: EncodedTextData) -> str:
    """What the tokens are, for display: "bpe tokens"."""
    return f"{data.tokenizer} tokens" if data.tokenizer_of is None else f"the tokens of {data.tokenizer_of}"
