"""Parts of a decoder written in ops, shared by draft heads and targets."""
