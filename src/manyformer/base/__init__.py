"""What needs no torch and none of the other wings: mistakes of users, files, plug-ins, signals, environments."""

VERSION = "0.2.0"
"""The version of the library."""
