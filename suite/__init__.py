"""The program: what is measured, how, and the command line.

The Python interface for those who script is `kernelmark.suite.api`; it is not imported here, so that
listing and helping stay quick.
"""

__version__ = "0.1.0"
