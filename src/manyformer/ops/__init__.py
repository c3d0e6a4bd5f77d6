"""Pure functions on tensors, each fast form beside the naive one that defines it."""
