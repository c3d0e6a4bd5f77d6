"""Mathematical properties of attention, measured: convex hull, equivariance, asymmetry, rank, variance of scores."""

from manyformer.properties.attention_properties import AttentionProperties, attention_properties, permutation_change

__all__ = ["AttentionProperties", "attention_properties", "permutation_change"]
