"""Messages between processes: settings, tensors, META, the status record."""
