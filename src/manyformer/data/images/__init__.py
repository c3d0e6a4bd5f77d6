"""Images: files, decoding, examples."""
