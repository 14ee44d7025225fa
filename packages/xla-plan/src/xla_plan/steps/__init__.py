"""The steps that are planned, and the process that measures them."""
