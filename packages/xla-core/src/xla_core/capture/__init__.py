"""Steps that are recorded once and replayed without running their Python."""
