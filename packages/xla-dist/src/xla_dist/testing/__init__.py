"""Tools for tests of jobs, shipped for users' own: faults on purpose."""
