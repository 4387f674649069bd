"""``python -m ckpt_cli`` is ``ckpt``."""

from ckpt_cli.cli import main

if __name__ == "__main__":
    main()
