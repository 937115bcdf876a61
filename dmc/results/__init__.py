"""Measurements of built models: speed, memory, quality."""
