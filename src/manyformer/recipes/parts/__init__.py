"""What recipes are made of, and what knows all of them: no paper has a file here."""
