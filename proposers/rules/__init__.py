"""The rules of drafting: pure functions of counts, confidences and
tables, parsed strictly at the edge.
"""
