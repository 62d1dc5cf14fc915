"""Edits of photographs, 512 x 512 pixels: what is asked, how it is drawn, how it is judged."""
