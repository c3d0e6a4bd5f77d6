"""Tokenizers of the `tokenizers` library from the content of their files."""

from collections.abc import Mapping
from typing import Any

import tokenizers

from manyformer.files.json_text import json_text
from manyformer.libraries.library_calls import without_panics
from manyformer.libraries.tokenizer_rules import check_rules


def read_tokenizer(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer with the content of a tokenizer.json.

    Raises ValueError for content that is none, and for rules that can make texts much longer or slow to read."""
    check_rules(content)
    with without_panics():
        try:
            return tokenizers.Tokenizer.from_str(json_text(content, ensure_ascii=True))
        # the library raises no more specific class than Exception
        except Exception as error:
            raise ValueError(str(error)) from error
