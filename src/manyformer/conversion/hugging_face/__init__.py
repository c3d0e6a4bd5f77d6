"""Models of Hugging Face's `transformers` as models of this library, and back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from manyformer.conversion.hugging_face.model_import import ImportedModel, ImportReport, import_model

if TYPE_CHECKING:
    from manyformer.conversion.hugging_face.model_export import ExportReport, export_model

__all__ = [
    "ExportReport",
    "ImportReport",
    "ImportedModel",
    "export_model",
    "import_model",
]


def __getattr__(name: str) -> Any:
    # imports need nothing of what writes folders
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.model_export"), name)
