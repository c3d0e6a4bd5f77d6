"""Examples to batches: lengths, rows, epochs."""
