"""Shipped helpers for tests: cases, sabotage, example records."""
