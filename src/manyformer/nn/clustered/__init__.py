"""Attention among tokens that are alike: hashed, clustered or sorted."""
