"""The pictures of the demo model: drawn scenes, edits and prompts."""
