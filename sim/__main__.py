"""`python -m sim`."""

import sys

if __name__ == "__main__":
    try:
        from sim.cli import main

        main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
