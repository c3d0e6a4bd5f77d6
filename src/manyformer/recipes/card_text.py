"""Texts about recipes that the command line and the documentation share: contracts and years."""

import re

from manyformer.recipes.registry import RecipeCard

CONTRACT_MEANINGS = {
    "causal": "no output depends on a later token",
    "incremental_decoding": "decoding from a cached state gives the same outputs as one pass",
    "cross_attention": "it attends to a second sequence",
    "padding_invariant": "padding and packing do not change the outputs",
}


def promised_contracts(card: RecipeCard) -> list[str]:
    """The names of the contracts that the card promises."""
    return [name for name in CONTRACT_MEANINGS if getattr(card, name)]


def publication_year(card: RecipeCard) -> int | None:
    """The year of the first paper that the card names."""
    match = re.search(r"\b(19|20)\d\d\b", card.paper)
    return int(match[0]) if match else None
