"""Which devices step which edits: policies for a worker of several devices."""
