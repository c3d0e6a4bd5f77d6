"""Tokenizers: text to ids, and back as a stream."""
