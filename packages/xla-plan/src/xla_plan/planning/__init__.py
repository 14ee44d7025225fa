"""From figures to plans: the chips, estimates, few layers for many, the search for a mesh."""
