"""Jobs: edits and workflows that outlive the client's call and a restart of the router."""
