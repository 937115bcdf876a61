"""What a run needs, without starting it: planner.py, peak_memory.py, fake_step.py; a start shares start_checks.py."""
