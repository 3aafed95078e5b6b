"""`python -m gfgen` is `gfgen`."""

from gfgen.cli.main import main

if __name__ == "__main__":
    main()
