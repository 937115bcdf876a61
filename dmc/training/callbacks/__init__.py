"""What happens along a run: figures, skipped steps, validation, snapshots, preemption, the watchdog."""
