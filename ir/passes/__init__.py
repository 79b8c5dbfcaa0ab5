"""The passes, one per file; `manager.PIPELINE` is their order."""
