"""`python -m cute_mla.cli`, the same as the console script."""

from cute_mla.cli import main

if __name__ == "__main__":
    main()
