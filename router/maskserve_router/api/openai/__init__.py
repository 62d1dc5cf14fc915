"""OpenAI's HTTP API: image edits, and beside them models and templates in the same manner."""
