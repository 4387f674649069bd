"""Ways to the files of an output: at any position, front to back, or as uploads."""
