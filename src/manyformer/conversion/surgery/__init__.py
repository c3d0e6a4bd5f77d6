"""Surgery: a trained model as another member of the family, with as many of its weights as fit."""

from manyformer.conversion.surgery.conversion import (
    ConversionOptions,
    ConversionReport,
    ConvertedModel,
    RecipeConversion,
    TensorOrigin,
)
from manyformer.conversion.surgery.convert import convert
from manyformer.conversion.surgery.recipe_conversions import CONVERSIONS, register

__all__ = [
    "CONVERSIONS",
    "ConversionOptions",
    "ConversionReport",
    "ConvertedModel",
    "RecipeConversion",
    "TensorOrigin",
    "convert",
    "register",
]
