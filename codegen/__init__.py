"""From graph to kernels: backends, expressions, plans, arenas, artifacts, the kernel store."""
