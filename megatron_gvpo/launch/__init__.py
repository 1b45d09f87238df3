"""Before and around a run: its ranks on one machine, what it will need, the SLURM script, and the state of the machine."""
