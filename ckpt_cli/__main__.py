"""``python -m ckpt_cli`` is ``ckpt``, which begins here: a signal is met before anything else is loaded."""

from __future__ import annotations


def main() -> None:
    """Run the command of this process and exit, as `ckpt_cli.cli.main` does; until that meets signals itself, Ctrl-C ends it at once."""
    import _signal  # type: ignore[import-not-found]  # `signal` without what it loads
    import os

    # Shells start background jobs with SIGINT ignored; that is respected.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda number, _: os._exit(128 + number))
    from ckpt_cli.cli import main

    main()


if __name__ == "__main__":
    main()
