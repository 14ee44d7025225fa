"""From a torch operator to an entry in the trace: one handler per overload, made when first met."""
