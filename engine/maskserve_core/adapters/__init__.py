"""LoRAs that edits may name: where they are, what they are, and bringing them to this host."""
