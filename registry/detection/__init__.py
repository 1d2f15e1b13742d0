"""How two commits are compared: from records to verdicts. Pure, and calibrated as it is shipped.

The way in is `decision`; the noise a decision rests on is `noise`; what is decided is a `verdict`.
"""
