"""Jobs: edits and workflows that continue after the client's call, and after a restart of the
router.
"""
