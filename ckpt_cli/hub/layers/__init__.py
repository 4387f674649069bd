"""Layers: what a config counts, how names of tensors number them, and whether the two agree."""
