"""Pure functions on tensors; each fast form has a reference that defines it."""
