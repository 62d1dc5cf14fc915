"""What an edit needs on a host or a device, and how it comes there."""
