"""Changes to MLIR modules before they are compiled: composites, constants, repairs for the partitioner."""
