"""Models between libraries and between recipes: loading, Hugging Face, surgery."""
