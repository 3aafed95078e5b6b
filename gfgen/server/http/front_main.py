"""Entry of the front's process.

    python -m gfgen.server.http.front_main LINK LISTENER

LINK and LISTENER are descriptors. If a package is missing, the process says so and exits with its own code.
"""

from __future__ import annotations

import sys

LACKS_PACKAGE = 78
"""Exit code of a front that lacks a package, as every other one would; EX_CONFIG of sysexits.h."""


def _told_of(error: ImportError) -> int:
    """One line for a package that is missing or broken, which is no mistake of ours."""
    if (error.name or "gfgen").partition(".")[0] == "gfgen":
        raise error
    what = f"the HTTP process cannot start: {error}"
    sys.stderr.write(f"gfgen: {what}; 'pip install gfgen' installs the packages that it needs\n")
    return LACKS_PACKAGE


if __name__ == "__main__":
    link, listener = map(int, sys.argv[1:3])
    try:
        from gfgen.server.http import front
    except ImportError as error:
        sys.exit(_told_of(error))
    front.main(link, listener)
