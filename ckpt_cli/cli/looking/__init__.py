"""Commands that look and write nothing of their own: `diff`, `show`, `scan`, `env`."""
