"""Drills: families of faults that are done to real commands, and what the commands make of them."""
