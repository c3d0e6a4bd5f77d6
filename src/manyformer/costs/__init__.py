"""What computations cost: operations, memory, time, and the machine that they are computed on."""
