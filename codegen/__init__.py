"""From graph to kernels: backends, expression printing, plans, arenas, artifacts, the kernel store."""
