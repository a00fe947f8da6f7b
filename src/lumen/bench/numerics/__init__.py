"""Every figure that a correct implementation of the number formats reproduces, measured here and now.

figures(rows) gives each figure with its published value, its bound and the measurement; the command prints them and
the tests assert the same list, so the expected values are written once.
"""
