"""What a run needs, without starting it: planner.py, memory.py, fake_step.py; start_checks.py is the start's too."""
