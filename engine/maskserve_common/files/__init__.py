"""Files that processes share: how they are kept, and the form of those with tensors."""
