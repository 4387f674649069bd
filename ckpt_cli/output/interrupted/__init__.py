"""Runs that are interrupted, and go on where they were: who holds an output, and which of its files are finished."""
