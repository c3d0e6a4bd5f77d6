"""The parts of `gpu.py`: each finds out one kind of thing about a device."""
