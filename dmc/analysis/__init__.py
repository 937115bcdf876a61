"""What gates have learned to merge and what training-free methods leave, as rows of the store of results.

`decisions.py` and `segments.py` look at a compressed model, `survivors.py` at a policy; `run.py` puts it together.
"""
