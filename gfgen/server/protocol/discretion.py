"""What a client is told of a failure: not where things lie on this machine. The log keeps that."""

from __future__ import annotations

import re
from collections.abc import Collection

_QUOTED = re.compile(r"""(['"`])~?/(?:[^'"`/\n]+/)*([^'"`/\n]+)/?\1""")
_PLAIN = re.compile(r"""(?<![\w./~:])~?/(?:[^\s/'"`,;:()\[\]<>]+/)*([^\s/'"`,;:()\[\]<>]+)/?""")


def without_folders(text: str, *, known: Collection[str] = ()) -> str:
    """The text with each absolute path cut to its last part.

    A path that is not in quotes is taken to end at a space; of those that are `known` it does not matter.
    """
    for path in sorted(known, key=len, reverse=True):
        last = path.rpartition("/")[2]
        text = last.join(re.split(rf"{re.escape(path)}(?![\w.-])", text))
    text = _QUOTED.sub(r"\1\2\1", text)
    return _PLAIN.sub(r"\1", text)
