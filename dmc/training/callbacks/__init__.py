"""Callbacks of a run: adapter initialization, evaluation, preemption, throughput, validation."""
