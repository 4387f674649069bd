"""`ckpt watch`: its options, the command, and what it prints."""
