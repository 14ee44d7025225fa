"""Models as StableHLO: programs of ``torch.export``, lowered by the rules of the lazy device."""
