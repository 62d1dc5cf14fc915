"""Names and rules that all packages share: settings, contracts, files, images, routing."""
