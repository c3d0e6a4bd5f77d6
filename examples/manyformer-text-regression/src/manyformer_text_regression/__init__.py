"""Text regression for manyformer: a number for each text."""
