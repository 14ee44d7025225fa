"""A job ends as a whole and says why: heartbeats, stall detection, collective order, failure reports."""
