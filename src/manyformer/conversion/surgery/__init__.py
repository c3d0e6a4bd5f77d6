"""Surgery: a trained model as another member of the family, with as many of its weights as fit."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.conversion.surgery.conversion import (
        ConversionOptions,
        ConversionReport,
        ConvertedModel,
        RecipeConversion,
        TensorOrigin,
    )
    from manyformer.conversion.surgery.convert import convert
    from manyformer.conversion.surgery.recipe_conversions import CONVERSIONS, register

_MODULES = {
    "CONVERSIONS": "manyformer.conversion.surgery.recipe_conversions",
    "ConversionOptions": "manyformer.conversion.surgery.conversion",
    "ConversionReport": "manyformer.conversion.surgery.conversion",
    "ConvertedModel": "manyformer.conversion.surgery.conversion",
    "RecipeConversion": "manyformer.conversion.surgery.conversion",
    "TensorOrigin": "manyformer.conversion.surgery.conversion",
    "convert": "manyformer.conversion.surgery.convert",
    "register": "manyformer.conversion.surgery.recipe_conversions",
}

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


_offer_names(__name__, _MODULES)
