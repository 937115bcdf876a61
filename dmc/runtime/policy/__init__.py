"""What runs the policies of `dmc.policies`: `dispatch.py` finds it.

eviction.py      shows a policy the attention, then frees what it lets go; notes of every entry in entry_notes.py
reading.py       reading part of the pages without a copy; quest.py, omnikv.py and infllm.py choose which
slow_pool.py     entries that lie in the host's memory until they are chosen (omnikv_offload.py)
"""
