"""Entry of the front's process, which ends when the run does, also while it is still starting.

    python -m gfgen.server.front_main LINK LISTENER RUN

Importing what the front needs takes a second, and many on a busy machine. A front that outlived its run for
so long would hold the address, and the server that is started in place of a killed one could not listen.
"""

from __future__ import annotations

import sys

from gfgen.runtime.lifeline import die_with_parent

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
    link, listener, run = map(int, sys.argv[1:4])
    die_with_parent(run)
    try:
        from gfgen.server import front
    except ImportError as error:
        sys.exit(_told_of(error))
    front.main(link, listener)
