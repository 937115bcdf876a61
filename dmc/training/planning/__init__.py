"""What a run needs, without starting it: planner.py, peak_memory.py, fake_step.py; start_checks.py is the start's too."""
