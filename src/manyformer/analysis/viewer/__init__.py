"""A page that shows what models compute for a text: attention of every head, and computation per token."""

from manyformer.analysis.viewer.model_view import ModelView, view_text
from manyformer.analysis.viewer.page import AttentionPage, view

__all__ = ["AttentionPage", "ModelView", "view", "view_text"]
