"""One program for all lengths up to a bound, where steps differ in their sizes only: see docs/shapes.md."""
