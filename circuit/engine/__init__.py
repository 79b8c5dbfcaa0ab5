"""Generation: sequences over the target's cache, drafts, verification, acceptance."""
