"""A study that anyone can rerun: bases, retrofits and controls over seeds, all methods at equal bytes, one table."""
