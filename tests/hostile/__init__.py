"""Hostile and broken inputs, by the catalogue in `cases`: each is built in a few lines and given to every command that reads."""
