"""torch_xla.distributed: launching, loaders and backends (package xla-dist), SPMD (xla-spmd)."""
