"""Layer-wise relevance propagation: how much each head contributes to what a model predicts."""

from manyformer.relevance.head_propagation import head_relevance, layer_relevance

__all__ = ["head_relevance", "layer_relevance"]
