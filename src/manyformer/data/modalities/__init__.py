"""Examples of several modalities."""
