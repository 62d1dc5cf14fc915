"""Jobs: edits and workflows that outlive the call that asks for them, and the router, too."""
