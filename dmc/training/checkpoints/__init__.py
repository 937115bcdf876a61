"""What a run goes on from: saving.py, reading.py, folder.py (sharded models), generations.py (last and previous)."""
