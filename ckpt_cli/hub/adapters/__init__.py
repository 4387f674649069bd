"""Adapters that are not fused here: whose they are, by their names and shapes."""
