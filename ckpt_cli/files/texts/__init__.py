"""Texts that programs write their settings in."""
