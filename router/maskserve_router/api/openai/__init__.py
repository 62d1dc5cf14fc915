"""OpenAI's HTTP API: image edits, models, and templates in the same style."""
