"""Entries of config.json, by what they are about."""
