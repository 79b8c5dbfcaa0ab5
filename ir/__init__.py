"""The language: ops, typed graphs over torch.fx, tracing, interpretation, passes, verification, printing."""
