"""Entry of the front's process, which ends when the run does, also while it is still starting.

    python -m gfgen.server.front_main LINK LISTENER RUN

Importing what the front needs takes a second, and many on a busy machine. A front that outlived its run for
so long would hold the address, and the server that is started in place of a killed one could not listen.
"""

from __future__ import annotations

import sys

from gfgen.runtime.lifeline import die_with_parent

if __name__ == "__main__":
    link, listener, run = map(int, sys.argv[1:4])
    die_with_parent(run)
    from gfgen.server import front

    front.main(link, listener)
