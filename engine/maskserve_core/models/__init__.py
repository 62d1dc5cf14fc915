"""What is known of each model family: one module per family, and one that lists them."""
