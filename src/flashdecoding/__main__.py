"""`python -m flashdecoding` is `flashdecoding`."""

from flashdecoding.cli import main

main()
