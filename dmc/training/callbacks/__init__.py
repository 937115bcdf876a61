"""Callbacks of a run: metrics, skipped steps, validation, snapshots, preemption, the watchdog."""
