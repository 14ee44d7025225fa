"""Makes plans of figures: chips, estimates, extrapolation to more layers, the search for a mesh."""
