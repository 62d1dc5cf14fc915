"""The demo model's pictures: drawn scenes and edits, and the judge of what came out."""
