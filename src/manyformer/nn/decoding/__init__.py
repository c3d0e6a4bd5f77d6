"""Steps of one token, bound once per generation: what modules cost besides their operators."""
