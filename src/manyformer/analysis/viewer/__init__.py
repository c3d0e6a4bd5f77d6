"""A page that shows what models compute for a text: attention of every head, and computation per token."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.viewer.model_view import ModelView, view_text
    from manyformer.analysis.viewer.page import AttentionPage, view

_MODULES = {
    "AttentionPage": "manyformer.analysis.viewer.page",
    "ModelView": "manyformer.analysis.viewer.model_view",
    "view": "manyformer.analysis.viewer.page",
    "view_text": "manyformer.analysis.viewer.model_view",
}

__all__ = ["AttentionPage", "ModelView", "view", "view_text"]


_offer_names(__name__, _MODULES)
