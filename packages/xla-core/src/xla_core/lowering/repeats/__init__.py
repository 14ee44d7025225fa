"""What repeats in a sequence of operations: a pure algorithm, which knows neither PyTorch nor jax."""
