"""The parts of `dmc gpu-check`: what each measures."""
