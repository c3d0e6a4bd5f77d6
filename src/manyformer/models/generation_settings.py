"""The tokens that begin and end the texts of an encoder-decoder from another library."""

from typing import ClassVar

from manyformer.files.json_records import Count, FileRecord

GENERATION_FILE = "generation.json"


class GenerationSettings(FileRecord):
    """With which token targets begin, which end them, and which are never generated or always stand first or last.

    Models of this library have none of it: their tokenizer names the start and the end. `forced_first` is the token
    after `start` (the language of an mBART), and `forced_last` ends a text that reaches its longest length.
    """

    title: ClassVar[str] = "the settings of generation"
    start: Count
    pad: Count
    stop_ids: tuple[Count, ...]
    banned_ids: tuple[Count, ...] = ()
    forced_first: Count | None = None
    forced_last: Count | None = None
