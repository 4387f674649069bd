"""Options of the command line as the keywords that they are in Python, for texts that callers of the library read."""

from __future__ import annotations

import re

OPTION = re.compile(r"(?<![\w-])(--(?P<long>[a-z][a-z-]*[a-z])|-o)(?![\w-])")
KEYWORDS = {"help": "help()", "all": "everything", "from": "begin", "to": "end", "no-normalize": "normalize"}
"""Options whose keyword in Python is another word."""

OF_OTHERS = ("recursive", "local-dir", "head")
"""Options of programs that hints name besides ckpt."""


def in_python(text: str) -> str:
    """A text with options as the keywords that they are in Python; whole commands stay as they are.

    >>> in_python("pass --match-base as well"), in_python("ckpt merge run --step 5")
    ('pass match_base as well', 'ckpt merge run --step 5')
    """

    def keyword(found: re.Match[str]) -> str:
        name = found["long"] or "output"
        return found[0] if name in OF_OTHERS else KEYWORDS.get(name, name.replace("-", "_"))

    return text if "ckpt " in text else OPTION.sub(keyword, text)
