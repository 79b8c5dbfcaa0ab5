"""The language: ops, typed graphs over torch.fx, tracing, passes, verification, printing."""
