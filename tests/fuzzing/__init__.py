"""A mutation fuzzer for everything that ckpt parses: `python -m tests.fuzzing --seconds 600`."""
