"""Files that other programs leave beside those of a checkpoint, and what they say of them."""
