"""The device made of a mesh, and how annotated steps are lowered to partitioned programs."""
