"""The backend that shows a mesh of devices as one device, and the lowering of annotated steps."""
