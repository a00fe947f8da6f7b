"""`python -m lumen` is the `lumen` command."""

from lumen.cli.main import main

if __name__ == "__main__":
    main()
