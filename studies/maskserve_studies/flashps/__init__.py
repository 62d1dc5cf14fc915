"""FlashPS's comparisons on real workers."""
