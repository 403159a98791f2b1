"""How a run gets its machines: a Ray cluster that is there, or one made inside a Slurm job."""
