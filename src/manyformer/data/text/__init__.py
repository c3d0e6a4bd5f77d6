"""Text: files, tables, pairs, treebanks."""
