"""Many processes (or threads) as replicas on the ``xla`` device; the façade ``torch_xla`` has the names."""
