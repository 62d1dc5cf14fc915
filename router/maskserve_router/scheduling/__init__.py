"""Edits from admission to their answer: priced, queued, placed on a worker, retried."""
