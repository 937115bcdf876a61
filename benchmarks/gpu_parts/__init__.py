"""The parts of `scripts/gpu_check.py`: what each measures."""
