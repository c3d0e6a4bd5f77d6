"""The names of the files of tokenizers and labels in a model folder."""

SHARED_TOKENIZER, SOURCE_TOKENIZER, TARGET_TOKENIZER = (
    "tokenizer.json",
    "tokenizer-source.json",
    "tokenizer-target.json",
)
LABELS = "labels.json"
TOKENIZER_FILES = (SHARED_TOKENIZER, SOURCE_TOKENIZER, TARGET_TOKENIZER, LABELS)
