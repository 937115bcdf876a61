"""Training: the Lightning module, its stages, and the callbacks of a run."""
