"""torch_xla._dynamo: where backends of other devices look for the bridge to ``torch.compile``."""
