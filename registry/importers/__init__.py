"""Results of other benchmark tools, made into journals. One small reader per format; `formats` knows them all.

A reader takes a file to `Results` and decides nothing. What a tool times in one process stays one replicate:
its iterations are no independent observations, however many they are.
"""
