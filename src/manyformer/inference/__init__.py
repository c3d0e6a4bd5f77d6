"""What a trained model is used for: generation, scores, early exits, a datastore."""
