"""What computations cost: operations, and the accelerators that they are computed on."""
