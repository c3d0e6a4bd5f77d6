"""Structures of tokens and of examples: roles and parts, dependency trees, graphs, orders of pixels."""
