"""Files on disk: atomic writing, typed JSON records, and folders whose files are verified before they are read."""

SHARED_TOKENIZER = "tokenizer.json"
SOURCE_TOKENIZER = "tokenizer-source.json"
TARGET_TOKENIZER = "tokenizer-target.json"
LABELS = "labels.json"
TOKENIZER_FILES = (SHARED_TOKENIZER, SOURCE_TOKENIZER, TARGET_TOKENIZER, LABELS)
"""The files of tokenizers and labels in a model folder."""
