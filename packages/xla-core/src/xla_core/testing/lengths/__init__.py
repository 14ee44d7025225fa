"""Random programs and operators with dimensions that vary: what the tests of varying shapes run."""
