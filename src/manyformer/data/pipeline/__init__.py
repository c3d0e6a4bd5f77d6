"""From a data section to batches: kinds of data, splits, preparation."""
