"""The pictures of the demo model: drawn scenes, edits, and the judge of edited pictures."""
