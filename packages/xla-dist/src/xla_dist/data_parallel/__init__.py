"""Training with a copy of the model per replica: loaders, gradients, optimizer state."""
