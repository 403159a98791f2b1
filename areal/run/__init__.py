"""What outlives a process: run folder, database, recover points, statistics, watchdog."""
