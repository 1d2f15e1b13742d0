"""What `results.py` writes, a module a part of the page. Imports run from `runs` over `tables` to the parts."""
