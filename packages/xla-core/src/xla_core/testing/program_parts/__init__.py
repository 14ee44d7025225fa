"""Random programs in parts: instructions, the machine that runs them, and what may be written next."""
