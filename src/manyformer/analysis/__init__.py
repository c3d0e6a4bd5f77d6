"""What is learned about a model: contracts, pictures, heads, speed, plans and comparisons."""
