"""`python -m kernelmark.suite`: the same as `kernelmark`."""

from .cli import main

main()
