"""Training of a draft head on text that its target writes itself."""
