"""The engine's thread schedules, plans and steps rows, in its own process or in others."""
