"""The processes and threads of a job: launching, sessions, rendezvous, key-value store."""
