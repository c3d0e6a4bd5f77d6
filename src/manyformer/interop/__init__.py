"""Weights of other libraries' models as models of this library, and back."""

from manyformer.interop.decision_transformer_weights import export_decision_transformer, import_decision_transformer

__all__ = ["export_decision_transformer", "import_decision_transformer"]
