"""The one door to the libraries of Hugging Face: no code of a folder, no network unless asked for, no questions."""
