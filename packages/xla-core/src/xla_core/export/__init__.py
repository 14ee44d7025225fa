"""Exports programs of ``torch.export`` as StableHLO, by the lowering rules of the lazy device."""
