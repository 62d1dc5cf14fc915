"""Commands that write documents and configuration from the code."""
