"""Quality and time of rows with refresh steps."""
