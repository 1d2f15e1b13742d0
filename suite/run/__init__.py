"""Many cells: the supervisor of a run, its worker process, and what is noted of the surroundings."""
