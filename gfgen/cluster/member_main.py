"""Entry of a node's process.

    python -m gfgen.cluster.member_main FD

FD is its end of the connection to the actor.
"""

import sys

from gfgen.cluster.member import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
