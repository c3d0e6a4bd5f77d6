"""The version of the library."""

VERSION = "0.2.0"
