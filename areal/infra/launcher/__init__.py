"""Launchers: join an existing Ray cluster, or create one inside a Slurm job."""
