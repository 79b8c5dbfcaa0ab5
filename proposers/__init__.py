"""Draft heads and the rules of drafting."""
