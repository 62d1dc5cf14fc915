"""Model families behind one interface, and what they share."""
