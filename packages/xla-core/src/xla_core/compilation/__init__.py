"""From a lowered program to an executable: caches in memory and on disk, compiling, warm starts."""
