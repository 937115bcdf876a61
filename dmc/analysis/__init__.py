"""What gates have learned to merge and what training-free methods leave, as figures and plain data.

`decisions.py` and `segments.py` look at a compressed model, `survivors.py` at a policy; `run.py` puts it together.
"""
