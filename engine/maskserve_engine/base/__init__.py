"""What every room speaks of: jobs and events, the mailbox to the engine's thread, clocks."""
