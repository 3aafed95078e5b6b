"""Entry of the front's process.

    python -m gfgen.server.http.front_main LINK LISTENER

LINK and LISTENER are descriptors. A missing package is reported in one line and with its own exit code.
"""

from __future__ import annotations

import sys

LACKS_PACKAGE = 78
"""Exit code for a missing package, which a restart does not fix; EX_CONFIG of sysexits.h."""


def _report(error: ImportError) -> int:
    """Report a missing or broken package; an error in gfgen itself is raised."""
    if (error.name or "gfgen").partition(".")[0] == "gfgen":
        raise error
    what = f"the HTTP process cannot start: {error}"
    sys.stderr.write(f"gfgen: {what}; 'pip install gfgen' installs what it needs\n")
    return LACKS_PACKAGE


if __name__ == "__main__":
    link, listener = map(int, sys.argv[1:3])
    try:
        from gfgen.server.http import front
    except ImportError as error:
        sys.exit(_report(error))
    front.main(link, listener)
