"""Measurement around the submission: the command line, the reader kernel and the comparison with peers."""
