"""What a run needs, without starting it: planner.py, memory_plan.py (formulas), memory_trace.py (activations)."""
