"""Types and services that all parts of the engine share: jobs, events, the mailbox, clocks."""
