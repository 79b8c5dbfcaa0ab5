"""Runners execute a plan and own its memory: eager, native CPU, CUDA graph; KV pools and leases."""
