"""Entry point of `python -m cute_mla`, equal to the console script."""

from cute_mla.cli import main

if __name__ == "__main__":
    main()
