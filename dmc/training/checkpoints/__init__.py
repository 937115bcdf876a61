"""Checkpoints of a run: folders that any number of ranks write together, in the background, and any number reads.

`folder.py` says what such a folder holds, and whether it is whole and without code, `saving.py` how and when they are
written and which ones a run keeps and goes on from.
"""
