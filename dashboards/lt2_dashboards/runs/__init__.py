"""Runs as pages show them: their table, one of them, several beside each other, and which are stalled."""
