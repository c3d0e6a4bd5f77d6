"""Weights of other libraries' models as models of this library, and back."""

from manyformer.interop.model_export import ExportReport, export_model
from manyformer.interop.model_import import ImportedModel, ImportReport, import_model

__all__ = [
    "ExportReport",
    "ImportReport",
    "ImportedModel",
    "export_model",
    "import_model",
]
