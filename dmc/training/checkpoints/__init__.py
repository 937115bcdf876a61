"""Checkpoints of a run: folders that any number of ranks write together, in the background, and any number reads.

`folder.py` says what such a folder holds and whether it is whole, `rotation.py` which ones a run keeps and goes on
from, `saving.py` how and when they are written, `weights.py` takes the weights out, `trust.py` refuses code.
"""
