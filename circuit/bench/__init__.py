"""Timing of an artifact beside its peers: the same weights, the
same rows, rounds that take turns.
"""
