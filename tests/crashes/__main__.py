"""Let commands that write crash at every call, and look at what they leave.

    python -m tests.crashes                 # every call, each way: ten minutes
    python -m tests.crashes --every 10      # every tenth
    python -m tests.crashes --in /dev/shm   # where it is done; memory is fastest

Ends with 1 and says what went wrong if an output was wrong, what stood there was harmed, or the next run did not succeed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.crashes.campaign import campaign, library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="crash at every N-th call")
    parser.add_argument("--in", type=Path, dest="place", help="where it is done")
    parser.add_argument("--only", action="append", help="a scenario (repeatable); default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        work = Path(folder).resolve()
        made = library(work)
        if made is None:
            print("this needs a C compiler and LD_PRELOAD on Linux")
            return 2
        report = campaign(work, made, every=options.every, only=options.only)
    print(f"{report.runs} crashes; {report.resumed} runs went on with finished files; exit codes {report.codes}")
    print("calls of runs that do not crash:", ", ".join(f"{count} {name}" for name, count in sorted(report.calls.items())))
    print(*report.faults, sep="\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
