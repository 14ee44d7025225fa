"""Makes a failed job end as a whole and say why: heartbeats, stalls, collective order, failure reports."""
