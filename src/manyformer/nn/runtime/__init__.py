"""What layers share besides attention: devices, precision, recomputation, dropout, norms, hooks of the training
loop."""
