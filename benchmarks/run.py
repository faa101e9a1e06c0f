"""The benchmark of `make bench`: the same as `flashdecoding bench`, whose options it takes (see --help)."""

import sys

from flashdecoding.cli import app


def main() -> None:
    """Run the benchmark with the arguments of this process."""
    app(["bench", *sys.argv[1:]], prog_name="flashdecoding")


if __name__ == "__main__":
    main()
