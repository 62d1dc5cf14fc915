"""Cached activations of templates: which are primed, where they lie, in which format."""
