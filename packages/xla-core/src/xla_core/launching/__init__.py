"""Launches of programs: donation, and runs that wait in order until their programs are compiled."""
