"""The job that this process is part of: environment, coordinator, start-up."""
